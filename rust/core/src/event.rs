//! The events of the books, as the journal holds them: postcard's encoding, one after another.

use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};

/// One change of the books; arguments are in the order in which the comments name them.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub enum Event {
    /// A new task (ordinal), or a requeued one again.
    Issue(u64),
    /// A generator works on the issued task (ordinal, attempt).
    Generating(u64, u64),
    /// The trajectory of a task arrived (ordinal, attempt, sampled tokens).
    Ready(u64, u64, u64),
    /// The learner takes ready tasks (lease, ordinals), all or none.
    Lease(u64, Vec<u64>),
    /// The tasks of a lease are ready again (lease).
    GiveBack(u64),
    /// A step used the lease and was committed (lease, step, trained tokens, masked tokens).
    Trained(u64, u64, u64, u64),
    /// The task ends without training (ordinal, attempt, reason, tokens). The tokens were sampled for it; once it is ready
    /// they are known, and `None` will do.
    Drop(u64, u64, String, Option<u64>),
    /// The task is to be issued again, with the next attempt (ordinal, reason, tokens as in `Drop`).
    Requeue(u64, String, Option<u64>),
    /// Tokens were sampled for no open task (reason, tokens).
    Waste(String, u64),
    /// The steps after this one are taken back; their tasks are requeued.
    Rewind(u64),
    /// The rollout of a task begins anew (ordinal): the turns kept so far are no part of it.
    Anew(u64),
    /// The end of an attempt was reported (ordinal, attempt). The last 16,384 are remembered.
    Answered(u64, u64),
    /// A note that the owner of the ledger keeps beside it, in place of the last one.
    Note(Vec<u8>),
}

impl Event {
    /// Appends its bytes.
    pub(crate) fn write(&self, out: &mut Vec<u8>) {
        let bytes = std::mem::take(out);
        *out = postcard::to_extend(self, bytes).expect("a vector has room for everything");
    }

    /// The first event of `bytes`, and the bytes behind it.
    pub(crate) fn read(bytes: &[u8]) -> Result<(Self, &[u8])> {
        postcard::take_from_bytes(bytes)
            .map_err(|error| Error::Ledger(format!("no event of this format: {error}")))
    }
}
