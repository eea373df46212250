//! On the way in and out: room that is being filled, and trajectories that are taken out.

use std::sync::Arc;

use super::item::{Content, Item};
use super::{closed, Arrival, Charge, Items, Label, Shared};
use crate::index::Key;
use crate::sync::{fence, Ordering};
use crate::Result;

/// Room for one trajectory that is being copied in.
pub(super) struct Slot {
    charge: Option<Charge>,
}

impl Slot {
    pub(super) fn new(shared: Arc<Shared>, bytes: usize) -> Self {
        Self {
            charge: Some(Charge { shared, bytes }),
        }
    }

    pub(super) fn publish(mut self, content: &Content<'_>, label: Label) -> Result<()> {
        let shared = match &self.charge {
            Some(charge) => charge.shared.clone(),
            None => return Ok(()),
        };
        // Before the copy, which may then use what was freed.
        shared.free_some();
        shared.bound_pool();
        let stored = content.store(&shared.pool)?;
        if shared.closed.load(Ordering::SeqCst) {
            return Err(closed());
        }
        let Some(charge) = self.charge.take() else {
            return Ok(());
        };
        let bytes = charge.bytes;
        let item = Arc::new(Item {
            stored,
            label,
            charge,
        });
        let mut arrival = Arrival { label, bytes, item };
        while let Err(back) = shared.arrivals.push(arrival) {
            arrival = back;
            let mut index = shared.lock();
            let late = shared.collect(&mut index);
            drop(index);
            drop(late);
        }
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
            charge.shared.budget.release_place();
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

    /// What is leased; a clone of it keeps the memory (and its share of the budget) beyond the lease.
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
                index.drop_count("closed", 1);
            }
            shared.budget.release_place();
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

pub(super) fn leases(shared: &Arc<Shared>, items: Items) -> Vec<Lease> {
    shared.free_some();
    let lease = |(sequence, item)| Lease {
        shared: shared.clone(),
        sequence,
        item: Some(item),
    };
    items.into_iter().map(lease).collect()
}
