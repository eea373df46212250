use std::sync::mpsc::{channel, RecvTimeoutError};
use std::time::Duration;

use sao_core::wait::{Pace, Stop};

/// Waits for events only: whoever relies on being woken by time hangs, and the test with it.
pub fn events_only() -> impl Pace {
    || Ok(Duration::from_secs(3600))
}

pub fn at_once() -> impl Pace {
    || Err(Stop::Deadline { waited_s: 0.0 })
}

/// Fails the test instead of hanging it.
pub fn within(seconds: u64, run: impl FnOnce() + Send + 'static) {
    let (done, finished) = channel();
    let thread = std::thread::spawn(move || {
        run();
        let _ = done.send(());
    });
    match finished.recv_timeout(Duration::from_secs(seconds)) {
        Ok(()) | Err(RecvTimeoutError::Disconnected) => thread.join().expect("no panic"),
        Err(RecvTimeoutError::Timeout) => panic!("hangs: a wake-up was lost"),
    }
}
