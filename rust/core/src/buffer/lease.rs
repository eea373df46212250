//! On the way in and out: room that is being filled, and trajectories that are taken out.

use std::sync::Arc;

use crate::buffer::content::Content;
use crate::buffer::index::Leased;
use crate::buffer::limits::Label;
use crate::buffer::ready::Key;
use crate::buffer::shared::{closed, Charge, Item, Shared};
use crate::error::Result;
use crate::sync::{fence, Ordering};

/// Room for one trajectory that is being copied in.
pub(crate) struct Slot {
    charge: Option<Charge>,
}

impl Slot {
    pub(crate) fn new(shared: Arc<Shared>, bytes: usize) -> Self {
        Self {
            charge: Some(Charge { shared, bytes }),
        }
    }

    /// Copies the trajectory in and hands it over.
    pub(crate) fn publish(mut self, content: &Content<'_>, label: Label) -> Result<()> {
        let Some(shared) = self.charge.as_ref().map(|charge| charge.shared.clone()) else {
            return Ok(());
        };
        shared.bound_pool();
        let stored = content.store(&shared.pool)?;
        if shared.closed.load(Ordering::SeqCst) {
            return Err(closed());
        }
        let Some(charge) = self.charge.take() else {
            return Ok(());
        };
        shared.hand_over(Arc::new(Item {
            stored,
            label,
            charge,
        }));
        // Pairs with the fences in `join` and `close`: either they find the item, or this sees them.
        fence(Ordering::SeqCst);
        let waits = shared.waiting_takes.load(Ordering::SeqCst) > 0
            || (shared.limits.drops() && shared.waiting_puts.load(Ordering::SeqCst) > 0);
        if waits || shared.closed.load(Ordering::SeqCst) {
            let mut index = shared.lock();
            let late = shared.collect(&mut index);
            shared.wake(&index);
            drop(index);
            drop(late);
        }
        Ok(())
    }
}

impl Drop for Slot {
    fn drop(&mut self) {
        if let Some(charge) = self.charge.take() {
            charge.shared.budget.release_places(1);
            // `charge` is dropped here: it gives the bytes back and wakes.
        }
    }
}

/// One trajectory taken out of the buffer. It must be committed or given back; dropping it gives it back.
#[derive(Debug)]
pub struct Lease {
    shared: Arc<Shared>,
    sequence: u64,
    item: Option<Arc<Item>>,
}

impl Lease {
    /// Its position in the order of completion.
    pub fn sequence(&self) -> u64 {
        self.sequence
    }

    /// The trajectory leased; a clone of it keeps the memory (and its share of the budget) beyond the lease.
    pub fn item(&self) -> Option<&Arc<Item>> {
        self.item.as_ref()
    }

    /// The trajectory has been used up.
    pub fn commit(mut self) {
        self.settle(true);
    }

    /// The trajectory goes back to its place in the order of completion.
    pub fn give_back(mut self) {
        self.settle(false);
    }

    fn settle(&mut self, committed: bool) {
        let Some(item) = self.item.take() else { return };
        let shared = &self.shared;
        let mut index = shared.lock();
        index.leased.remove(&self.sequence);
        if committed || index.closed {
            if committed {
                index.committed += 1;
            } else {
                index.count_dropped("closed", 1);
            }
            shared.budget.release_places(1);
        } else {
            let key = Key {
                sequence: self.sequence,
                bytes: item.charge.bytes,
                task: item.label.task,
            };
            index.admit(key, item.label.min_version, item.clone());
        }
        shared.gather(&mut index);
        shared.wake(&index);
        drop(index);
        drop(item);
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        self.settle(false);
    }
}

pub(crate) fn leases(shared: &Arc<Shared>, items: Leased<Arc<Item>>) -> Vec<Lease> {
    let lease = |(sequence, item)| Lease {
        shared: shared.clone(),
        sequence,
        item: Some(item),
    };
    items.into_iter().map(lease).collect()
}
