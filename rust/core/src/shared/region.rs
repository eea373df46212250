//! The memory that a sender and a receiver share: what lies where in it, and every access that is not an atomic.
//!
//! The other process may write any byte at any time, so nothing read from here is used as a place or a length before it
//! was compared with what this side knows; a place outside the memory cannot be named at all (`write`, `read` and
//! `address` check their bounds). What a peer changes while it is read comes out as a mixture of bytes, as from a file.
#![allow(unsafe_code)]

use crate::sync::AtomicU64;

/// Data starts and payloads lie at multiples of this.
pub(super) const ALIGN: usize = 64;
const PAGE: usize = 4096;
const MAX_BYTES: usize = 1 << 40;

/// A counter on cache lines of its own: each is written by one side and read by the other.
#[repr(C, align(128))]
#[derive(Debug, Default)]
pub(super) struct Line(pub(super) AtomicU64);

/// The first page.
#[repr(C)]
#[derive(Debug, Default)]
pub(super) struct Control {
    /// Payloads published, ever; written by the sender.
    pub(super) published: Line,
    /// The sender waits until so many are released, 0 when it does not; taken back to 0 by the receiver that tells it.
    pub(super) wanted: Line,
    /// All payloads below this are released; written by the receiver.
    pub(super) released: Line,
    /// The receiver sleeps; taken back to 0 by the sender that wakes it.
    pub(super) asleep: Line,
}

/// Where a payload lies, and its header behind it; written by the sender.
#[repr(C, align(32))]
#[derive(Debug, Default)]
pub(super) struct Entry {
    pub(super) start: AtomicU64,
    pub(super) payload: AtomicU64,
    pub(super) header: AtomicU64,
}

/// Few in a model, so that they are used again soon.
const LEAST_PLACES: usize = if cfg!(loom) { 4 } else { 256 };

/// Places for payloads that are not released yet, beside the bound in bytes.
pub(super) fn places(capacity: usize) -> usize {
    let pages = (capacity / PAGE).next_power_of_two();
    pages.clamp(LEAST_PLACES, 1 << 16)
}

fn entries_bytes(capacity: usize) -> usize {
    (places(capacity) * size_of::<Entry>()).next_multiple_of(PAGE)
}

/// Bytes of the memory for `capacity` bytes of data, none unless that is a whole number of pages in bounds.
pub fn total_bytes(capacity: usize) -> Option<usize> {
    let fits = (PAGE..=MAX_BYTES).contains(&capacity) && capacity.is_multiple_of(PAGE);
    fits.then(|| PAGE + entries_bytes(capacity) + capacity)
}

/// The memory, as long as this lives.
#[derive(Debug)]
pub struct Region {
    control: *const Control,
    entries: *const Entry,
    data: *mut u8,
    capacity: usize,
    #[cfg_attr(not(loom), allow(dead_code))] // there to be dropped
    owner: owner::Owner,
}

// SAFETY: the counters and entries are atomics; data is copied into by the one `Writer` and out by readers of places
// that were published, which the protocol keeps apart (modelled under loom); the pointers belong to `owner`.
unsafe impl Send for Region {}
// SAFETY: as above.
unsafe impl Sync for Region {}

impl Region {
    pub(super) fn control(&self) -> &Control {
        // SAFETY: points to the first bytes of `owner`, which are aligned, live as long as `self`, and are atomics only.
        unsafe { &*self.control }
    }

    pub(super) fn entry(&self, ticket: u64) -> &Entry {
        let index = ticket as usize & (places(self.capacity) - 1);
        // SAFETY: `index` is below the number of entries; else as above.
        unsafe { &*self.entries.add(index) }
    }

    /// Bytes for payloads and headers.
    pub fn capacity(&self) -> usize {
        self.capacity
    }

    /// Copies `bytes` to `start`.
    ///
    /// # Panics
    /// When they do not lie inside.
    pub(super) fn write(&self, start: usize, bytes: &[u8]) {
        self.check(start, bytes.len());
        #[cfg(loom)]
        self.owner.written(start, bytes.len());
        // SAFETY: the bounds were checked, and a borrowed slice of this process cannot overlap with this memory, which
        // is never lent as one that can be written; nobody else of this process writes to a place not yet published.
        unsafe {
            self.data
                .add(start)
                .copy_from_nonoverlapping(bytes.as_ptr(), bytes.len());
        }
    }

    /// Copies from `start` on into all of `out`.
    ///
    /// # Panics
    /// When they do not lie inside.
    pub fn read(&self, start: usize, out: &mut [u8]) {
        self.check(start, out.len());
        #[cfg(loom)]
        self.owner.read(start, out.len());
        // SAFETY: the bounds were checked; `out` is borrowed by this process and thus not a part of this memory.
        unsafe {
            self.data
                .add(start)
                .copy_to_nonoverlapping(out.as_mut_ptr(), out.len());
        }
    }

    /// Where `start` lies in this process; good for `bytes` bytes as long as this lives.
    ///
    /// # Panics
    /// When they do not lie inside.
    pub fn address(&self, start: usize, bytes: usize) -> *const u8 {
        self.check(start, bytes);
        self.data.wrapping_add(start)
    }

    fn check(&self, start: usize, bytes: usize) {
        let inside = start <= self.capacity && bytes <= self.capacity - start;
        assert!(inside, "{bytes} bytes at {start} of {}", self.capacity);
    }
}

#[cfg(not(loom))]
mod owner {
    use std::os::fd::BorrowedFd;
    use std::ptr::{null_mut, NonNull};

    use rustix::fs::{fcntl_get_seals, fstat, SealFlags};
    use rustix::mm::{mmap, munmap, MapFlags, ProtFlags};

    use super::{entries_bytes, total_bytes, Region, PAGE};
    use crate::{Error, Result};

    /// A mapping; unmapped when dropped.
    #[derive(Debug)]
    pub(super) struct Owner {
        base: NonNull<u8>,
        bytes: usize,
    }

    impl Drop for Owner {
        fn drop(&mut self) {
            // SAFETY: mapped by `map` with this length, and nothing that points into it outlives its `Region`.
            let _ = unsafe { munmap(self.base.as_ptr().cast(), self.bytes) };
        }
    }

    impl Region {
        /// Maps `fd`, which must be memory of the size for `capacity` bytes of data that can never shrink. `populate`
        /// touches all of it at once.
        ///
        /// # Errors
        /// [`Error::Transport`].
        pub fn map(fd: BorrowedFd<'_>, capacity: usize, populate: bool) -> Result<Self> {
            let wrong = |what: String| Error::Transport(format!("shared memory: {what}"));
            let bytes = total_bytes(capacity)
                .ok_or_else(|| wrong(format!("a capacity of {capacity} bytes")))?;
            let seals =
                fcntl_get_seals(fd).map_err(|error| wrong(format!("not a memfd ({error})")))?;
            let size = fstat(fd).map_err(|error| wrong(error.to_string()))?.st_size;
            // Pages beyond the end of a file that shrank would kill who reads them.
            if !seals.contains(SealFlags::SHRINK) || size != bytes as i64 {
                return Err(wrong(format!(
                    "{size} bytes with seals {seals:?}, expected {bytes} that cannot shrink"
                )));
            }
            let flags = if populate {
                MapFlags::SHARED | MapFlags::POPULATE
            } else {
                MapFlags::SHARED
            };
            let protection = ProtFlags::READ | ProtFlags::WRITE;
            // SAFETY: a new mapping at an address of the kernel's choice.
            let base = unsafe { mmap(null_mut(), bytes, protection, flags, fd, 0) }
                .map_err(|error| wrong(format!("{bytes} bytes cannot be mapped: {error}")))?;
            let base = NonNull::new(base.cast::<u8>()).ok_or_else(|| wrong("no address".into()))?;
            let owner = Owner { base, bytes };
            // Page-aligned, with the control page, the entries and the data one after the other (`total_bytes`).
            let entries = base.as_ptr().wrapping_add(PAGE);
            Ok(Self {
                control: base.as_ptr().cast(),
                entries: entries.cast(),
                data: entries.wrapping_add(entries_bytes(capacity)),
                capacity,
                owner,
            })
        }
    }
}

/// Under loom the memory is on the heap, and each block of it is a cell of which loom knows who reads and writes it.
#[cfg(loom)]
mod owner {
    use super::{places, Control, Entry, Region, ALIGN};
    use loom::cell::UnsafeCell;

    /// Aligned, so that one model is like the other.
    #[repr(align(64))]
    #[derive(Debug, Clone, Copy)]
    struct Block(#[allow(dead_code)] [u8; ALIGN]); // read through the pointer

    #[derive(Debug)]
    pub(super) struct Owner {
        _control: Box<Control>,
        _entries: Box<[Entry]>,
        _data: Box<[Block]>,
        blocks: Box<[UnsafeCell<()>]>,
    }

    impl Owner {
        fn blocks(&self, start: usize, bytes: usize) -> &[UnsafeCell<()>] {
            &self.blocks[start / ALIGN..(start + bytes).div_ceil(ALIGN)]
        }

        pub(super) fn written(&self, start: usize, bytes: usize) {
            for block in self.blocks(start, bytes) {
                block.with_mut(|_| ());
            }
        }

        pub(super) fn read(&self, start: usize, bytes: usize) {
            for block in self.blocks(start, bytes) {
                block.with(|_| ());
            }
        }
    }

    impl Region {
        pub(in crate::shared) fn model(capacity: usize) -> Self {
            let control = Box::<Control>::default();
            let entries: Box<[Entry]> = (0..places(capacity)).map(|_| Entry::default()).collect();
            let mut data = vec![Block([0; ALIGN]); capacity / ALIGN].into_boxed_slice();
            Self {
                control: &raw const *control,
                entries: entries.as_ptr(),
                data: data.as_mut_ptr().cast(),
                capacity,
                owner: Owner {
                    _control: control,
                    _entries: entries,
                    _data: data,
                    blocks: (0..capacity / ALIGN).map(|_| UnsafeCell::new(())).collect(),
                },
            }
        }
    }
}
