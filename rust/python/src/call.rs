//! How a call into the core runs under Python: with or without the GIL, and when it waits: parked, with a deadline, noticing signals.

use std::time::{Duration, Instant};

use pyo3::prelude::*;
use sao_core::wait::{Pace, Stop};

use crate::error::{guard, to_py, validation};

const SIGNAL_CHECK: Duration = Duration::from_millis(100);

struct Deadline {
    end: Option<Instant>,
    timeout_s: f64,
    next_check: Instant,
    /// The exception that a signal handler raised.
    raised: Option<PyErr>,
}

impl Pace for Deadline {
    fn next(&mut self) -> Result<Duration, Stop> {
        let now = Instant::now();
        let left = self
            .end
            .map_or(SIGNAL_CHECK, |end| end.saturating_duration_since(now));
        if left.is_zero() {
            return Err(Stop::Deadline {
                waited_s: self.timeout_s,
            });
        }
        if now >= self.next_check {
            self.next_check = now + SIGNAL_CHECK;
            // `try_attach` fails only when the interpreter shuts down: then nobody waits for the result.
            #[allow(clippy::redundant_closure_for_method_calls)]
            // the method itself is not general enough
            match Python::try_attach(|py| py.check_signals()) {
                Some(Ok(())) => {}
                Some(Err(error)) => {
                    self.raised = Some(error);
                    return Err(Stop::Interrupted);
                }
                None => return Err(Stop::Interrupted),
            }
        }
        Ok(left.min(SIGNAL_CHECK))
    }
}

/// Runs a core call that waits for nobody, without the GIL if it is `long`: giving the GIL up may cost its switch interval to
/// come back, thousands of times what a short call takes.
pub fn run<T: Send>(
    py: Python<'_>,
    long: bool,
    call: impl FnOnce() -> sao_core::Result<T> + Send,
) -> PyResult<T> {
    if long {
        py.detach(|| guard(call))
    } else {
        guard(call)
    }
}

/// Refuses a timeout that is none.
pub fn check_timeout(timeout_s: Option<f64>) -> PyResult<()> {
    match timeout_s {
        Some(seconds) if seconds.is_nan() || seconds < 0.0 => Err(validation(format!(
            "timeout_s: {seconds} must be at least 0"
        ))),
        _ => Ok(()),
    }
}

/// Runs a blocking core call without the GIL. `timeout_s` of `None` waits without end; 0 does not wait.
pub fn blocking<T: Send>(
    py: Python<'_>,
    timeout_s: Option<f64>,
    call: impl FnOnce(&mut dyn Pace) -> sao_core::Result<T> + Send,
) -> PyResult<T> {
    check_timeout(timeout_s)?;
    let now = Instant::now();
    // Beyond what a clock can hold is as good as without end.
    let end =
        timeout_s.and_then(|seconds| now.checked_add(Duration::try_from_secs_f64(seconds).ok()?));
    let mut pace = Deadline {
        end,
        timeout_s: timeout_s.unwrap_or(f64::INFINITY),
        // Not at once: it needs the GIL, which was just given up for somebody else.
        next_check: now + SIGNAL_CHECK,
        raised: None,
    };
    let result =
        py.detach(|| std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| call(&mut pace))));
    match result {
        Ok(Ok(value)) => Ok(value),
        Ok(Err(error)) => Err(pace.raised.take().unwrap_or_else(|| to_py(error))),
        Err(panic) => guard(move || std::panic::resume_unwind(panic)),
    }
}
