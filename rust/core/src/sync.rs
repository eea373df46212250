//! The primitives of everything concurrent here: those of `std`, or those of loom, which tries all interleavings.

#[cfg(not(loom))]
pub(crate) use crossbeam_queue::SegQueue;
#[cfg(not(loom))]
pub(crate) use std::sync::{
    atomic::{fence, AtomicBool, AtomicUsize, Ordering},
    Condvar, Mutex, MutexGuard,
};

#[cfg(loom)]
pub(crate) use loom::sync::{
    atomic::{fence, AtomicBool, AtomicUsize, Ordering},
    Condvar, Mutex, MutexGuard,
};

use std::sync::PoisonError;

/// Locks, also after a panic of another thread that held it: what these mutexes guard is whole between statements.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The contract of `crossbeam_queue::SegQueue`, for loom: first in, first out, between any threads.
#[cfg(loom)]
#[derive(Debug)]
pub(crate) struct SegQueue<T>(Mutex<std::collections::VecDeque<T>>);

#[cfg(loom)]
impl<T> SegQueue<T> {
    pub(crate) fn new() -> Self {
        Self(Mutex::new(std::collections::VecDeque::new()))
    }

    pub(crate) fn push(&self, value: T) {
        lock(&self.0).push_back(value);
    }

    pub(crate) fn pop(&self) -> Option<T> {
        lock(&self.0).pop_front()
    }
}
