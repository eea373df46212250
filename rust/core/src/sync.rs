//! The primitives of everything concurrent here: those of `std`, or those of loom, which tries all interleavings.

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
