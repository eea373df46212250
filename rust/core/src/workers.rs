//! A pool of worker threads, the helpers of calls whose work is cut into pieces already.
//!
//! Helpers stay parked between calls. Whoever calls works too, from the first moment, and when no piece is left it lets
//! nobody in any more: a helper that comes too late is not waited for, so a busy machine makes a call no slower than one
//! thread is. That also holds after a fork, which leaves no helpers.
#![allow(unsafe_code)]

use std::panic::{catch_unwind, AssertUnwindSafe};
#[cfg(not(loom))]
use std::sync::Arc;
use std::sync::PoisonError;

use crate::sync::{AtomicBool, AtomicUsize, Condvar, Mutex, MutexGuard, Ordering};

/// Looks, some ten microseconds long, at whether the last helper has left, before the call parks for it.
const SPINS: usize = if cfg!(loom) { 0 } else { 1000 };

/// The work of one call. It is used only by helpers that are counted as inside, and the call waits for those.
#[derive(Clone, Copy)]
struct Job(*const (dyn Fn() + Sync));

// SAFETY: what it points to may be shared by threads (`Sync`).
unsafe impl Send for Job {}

#[derive(Default)]
struct State {
    /// There while the call that gave it is under way.
    job: Option<Job>,
    /// Helpers that may still come in.
    places: usize,
    /// Helpers there are.
    threads: usize,
    /// They shall end.
    over: bool,
}

/// Some helpers, for one call at a time.
pub(crate) struct Workers {
    state: Mutex<State>,
    come: Condvar,
    left: Condvar,
    /// Helpers at work. Goes up under the lock only.
    inside: AtomicUsize,
    panicked: AtomicBool,
}

impl Workers {
    pub(crate) fn new() -> Self {
        Self {
            state: Mutex::new(State::default()),
            come: Condvar::new(),
            left: Condvar::new(),
            inside: AtomicUsize::new(0),
            panicked: AtomicBool::new(false),
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What a helper does.
    pub(crate) fn help(&self) {
        let mut state = self.lock();
        while !state.over {
            let Some(job) = state.job.filter(|_| state.places > 0) else {
                let woken = self.come.wait(state);
                state = woken.unwrap_or_else(PoisonError::into_inner);
                continue;
            };
            state.places -= 1;
            self.inside.fetch_add(1, Ordering::Relaxed);
            drop(state);
            // SAFETY: the call that gave `job` was under way when this was counted as inside, both under the lock, and
            // does not return before `inside` is 0 again.
            let work = AssertUnwindSafe(|| unsafe { (*job.0)() });
            if catch_unwind(work).is_err() {
                self.panicked.store(true, Ordering::Relaxed);
            }
            let last = self.inside.fetch_sub(1, Ordering::Release) == 1;
            state = self.lock();
            if last {
                self.left.notify_all();
            }
        }
    }

    /// Runs `work` here and on up to `helpers` threads that come while it runs here; returns when nobody is in it. It
    /// runs here alone when the helpers are with another call.
    ///
    /// # Panics
    /// When `work` panics, here or there.
    pub(crate) fn run(&self, helpers: usize, work: &(dyn Fn() + Sync)) {
        let mut state = self.lock();
        if state.job.is_some() || helpers == 0 {
            drop(state);
            return work();
        }
        // SAFETY: only the lifetime changes. `Leave` waits for everybody who got hold of it, even if `work` panics.
        let work_for_all: &'static (dyn Fn() + Sync) = unsafe { std::mem::transmute(work) };
        state.job = Some(Job(work_for_all));
        state.places = helpers;
        // A call that panics itself leaves unsaid that a helper did.
        self.panicked.store(false, Ordering::Relaxed);
        drop(state);
        for _ in 0..helpers {
            self.come.notify_one();
        }
        let leave = Leave(self);
        work();
        drop(leave);
        assert!(
            !self.panicked.swap(false, Ordering::Relaxed),
            "a helper panicked"
        );
    }

    #[cfg(all(test, loom))]
    fn end(&self) {
        self.lock().over = true;
        self.come.notify_all();
    }
}

/// Lets nobody in any more and waits for those who are inside.
struct Leave<'a>(&'a Workers);

impl Drop for Leave<'_> {
    fn drop(&mut self) {
        let workers = self.0;
        workers.lock().places = 0;
        for _ in 0..SPINS {
            if workers.inside.load(Ordering::Acquire) == 0 {
                break;
            }
            std::hint::spin_loop();
        }
        let mut state = workers.lock();
        while workers.inside.load(Ordering::Acquire) > 0 {
            let woken = workers.left.wait(state);
            state = woken.unwrap_or_else(PoisonError::into_inner);
        }
        state.job = None;
    }
}

/// [`Workers::run`] with the helpers of this process; at most one for each further CPU, started when first asked for.
#[cfg(not(loom))]
pub(crate) fn together(helpers: usize, work: &(dyn Fn() + Sync)) {
    static WORKERS: Mutex<Option<(u32, Arc<Workers>)>> = Mutex::new(None);
    static CPUS: std::sync::OnceLock<usize> = std::sync::OnceLock::new();
    // Held for a moment only. In a process that was forked in this moment it stays locked, and each works alone.
    let Ok(mut kept) = WORKERS.try_lock() else {
        return work();
    };
    let process = std::process::id();
    let workers = match &*kept {
        Some((of, workers)) if *of == process => workers.clone(),
        _ => {
            let workers = Arc::new(Workers::new());
            *kept = Some((process, workers.clone()));
            workers
        }
    };
    drop(kept);
    // Asking costs some files to be read.
    let cpus = *CPUS.get_or_init(|| std::thread::available_parallelism().map_or(1, Into::into));
    let helpers = helpers.min(cpus - 1);
    let mut state = workers.lock();
    while state.threads < helpers {
        let helper = workers.clone();
        let thread = std::thread::Builder::new().name("sao-helper".into());
        if thread.spawn(move || helper.help()).is_err() {
            break;
        }
        state.threads += 1;
    }
    drop(state);
    workers.run(helpers, work);
}

/// The models look at [`Workers`] itself.
#[cfg(loom)]
pub(crate) fn together(_helpers: usize, work: &(dyn Fn() + Sync)) {
    work();
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::{together, Workers};
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::sync::Arc;
    use std::time::{Duration, Instant};

    /// `count` of them, whose threads stay parked when the test has ended.
    fn workers(count: usize) -> Arc<Workers> {
        let workers = Arc::new(Workers::new());
        for _ in 0..count {
            let helper = workers.clone();
            std::thread::spawn(move || helper.help());
        }
        workers
    }

    /// Runs of `work` until another thread was in it.
    fn until_helped(workers: &Workers, work: &(dyn Fn() + Sync)) {
        let (begin, caller) = (Instant::now(), std::thread::current().id());
        let helped = AtomicUsize::new(0);
        while helped.load(Ordering::SeqCst) == 0 {
            assert!(begin.elapsed() < Duration::from_secs(30), "nobody helps");
            workers.run(1, &|| {
                if std::thread::current().id() == caller {
                    // Leaves the other some time to come.
                    let begin = Instant::now();
                    while helped.load(Ordering::SeqCst) == 0
                        && begin.elapsed() < Duration::from_millis(20)
                    {
                        std::thread::yield_now();
                    }
                } else {
                    helped.fetch_add(1, Ordering::SeqCst);
                    work();
                }
            });
        }
    }

    #[test]
    fn every_piece_is_done_once_and_nobody_stays_inside() {
        let workers = workers(2);
        for round in 0..2000 {
            let pieces: Vec<AtomicUsize> = (0..round % 50).map(|_| AtomicUsize::new(0)).collect();
            let next = AtomicUsize::new(0);
            workers.run(2, &|| {
                while let Some(piece) = pieces.get(next.fetch_add(1, Ordering::SeqCst)) {
                    piece.fetch_add(1, Ordering::SeqCst);
                }
            });
            assert_eq!(workers.inside.load(Ordering::SeqCst), 0);
            assert!(pieces.iter().all(|done| done.load(Ordering::SeqCst) == 1));
        }
        until_helped(&workers, &|| {});
    }

    #[test]
    fn a_call_does_not_wait_for_helpers_that_do_not_come() {
        let done = AtomicUsize::new(0);
        let work = || {
            done.fetch_add(1, Ordering::SeqCst);
        };
        Workers::new().run(3, &work);
        assert_eq!(done.load(Ordering::SeqCst), 1);
        // Inside a call the helpers are taken.
        let workers = workers(1);
        workers.run(1, &|| workers.run(1, &work));
        together(0, &work);
        together(500, &|| together(1, &work));
        assert!(done.load(Ordering::SeqCst) >= 4);
    }

    #[test]
    fn a_panic_comes_out_and_the_workers_go_on() {
        let workers = workers(1);
        let here = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            workers.run(1, &|| panic!("expected by a test"));
        }));
        assert!(here.is_err());
        let there = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            until_helped(&workers, &|| panic!("expected by a test"));
        }));
        assert!(there.is_err());
        until_helped(&workers, &|| {});
    }

    #[test]
    fn a_panic_on_both_sides_is_not_told_to_the_next_call() {
        let (workers, caller) = (workers(1), std::thread::current().id());
        let (helped, begin) = (AtomicUsize::new(0), Instant::now());
        let both = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            workers.run(1, &|| {
                if std::thread::current().id() == caller {
                    while helped.load(Ordering::SeqCst) == 0 {
                        assert!(begin.elapsed() < Duration::from_secs(30), "nobody helps");
                        std::thread::yield_now();
                    }
                } else {
                    helped.store(1, Ordering::SeqCst);
                }
                panic!("expected by a test");
            });
        }));
        assert!(both.is_err() && helped.load(Ordering::SeqCst) == 1);
        workers.run(1, &|| {});
    }
}

#[cfg(all(test, loom))]
mod models {
    use super::Workers;
    use loom::sync::atomic::{AtomicUsize, Ordering};
    use loom::thread;
    use std::sync::Arc;

    /// Two calls one after another, with a helper that comes in time, too late or not at all: each piece is done once,
    /// and nobody is in the work of a call that has returned.
    #[test]
    fn a_helper_comes_when_it_wants() {
        let mut builder = loom::model::Builder::new();
        builder.preemption_bound = Some(3);
        builder.check(|| {
            let workers = Arc::new(Workers::new());
            let helper = {
                let workers = workers.clone();
                thread::spawn(move || workers.help())
            };
            for _ in 0..2 {
                let (next, done) = (AtomicUsize::new(0), AtomicUsize::new(0));
                let under_way = AtomicUsize::new(0);
                workers.run(1, &|| {
                    under_way.fetch_add(1, Ordering::SeqCst);
                    while next.fetch_add(1, Ordering::SeqCst) < 2 {
                        done.fetch_add(1, Ordering::Relaxed);
                    }
                    under_way.fetch_sub(1, Ordering::SeqCst);
                });
                assert_eq!(under_way.load(Ordering::SeqCst), 0);
                assert_eq!(done.load(Ordering::Relaxed), 2);
            }
            workers.end();
            helper.join().unwrap();
        });
    }
}
