//! How a thread waits here: parked until woken, asking its caller now and then whether to go on.
//!
//! The core has no clock and knows no signals. A caller that may block passes a [`Pace`], which says how long to
//! park next or why to stop; it is always asked without a lock held, so it may take locks of its own (the
//! interpreter's, say).

use std::time::Duration;

use crate::Error;

/// Why a wait ended without its event.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Stop {
    /// The caller's deadline passed.
    Deadline {
        /// How long the caller was ready to wait, seconds.
        waited_s: f64,
    },
    /// The caller was interrupted (a signal).
    Interrupted,
}

impl Stop {
    /// The error of a wait for `what`.
    pub fn error(self, what: &str) -> Error {
        match self {
            Self::Deadline { waited_s } => {
                Error::Deadline(format!("waited {waited_s} s for {what}"))
            }
            Self::Interrupted => {
                Error::Interrupted(format!("interrupted while waiting for {what}"))
            }
        }
    }
}

/// Decides how a blocked call waits.
pub trait Pace {
    /// The longest time to park before asking again, or the reason to give up.
    ///
    /// # Errors
    /// [`Stop`] ends the wait; nothing has been taken or stored then.
    fn next(&mut self) -> Result<Duration, Stop>;
}

impl<F: FnMut() -> Result<Duration, Stop>> Pace for F {
    fn next(&mut self) -> Result<Duration, Stop> {
        self()
    }
}
