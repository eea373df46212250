//! What happens to tasks, as the records of the ledger's file.

use crate::compact::{Base, Part};
use crate::error::{Error, Result};

/// One step of the ledger.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Event {
    Issue {
        ordinal: u64,
    },
    Generating {
        ordinal: u64,
        attempt: u64,
    },
    Ready {
        ordinal: u64,
        attempt: u64,
        tokens: u64,
    },
    Lease {
        lease: u64,
        ordinals: Vec<u64>,
    },
    GiveBack {
        lease: u64,
    },
    Trained {
        lease: u64,
        step: u64,
        trained: u64,
        masked: u64,
    },
    Drop {
        ordinal: u64,
        attempt: u64,
        reason: String,
        tokens: Option<u64>,
    },
    Requeue {
        ordinal: u64,
        reason: String,
        tokens: Option<u64>,
    },
    Waste {
        reason: String,
        tokens: u64,
    },
    /// The last committed step is taken back; `before` is the one that is then the last. Members: ordinal, attempt.
    Rewind {
        step: u64,
        before: Option<u64>,
        trained: u64,
        masked: u64,
        members: Vec<(u64, u64)>,
    },
    /// The file begins with a picture of the state (`compact.rs`): its numbers, then its entries.
    Base(Base),
    Part(Part),
}

impl Event {
    /// The record: a tag, then numbers as LEB128 varints, then the reason.
    pub(crate) fn bytes(&self) -> Vec<u8> {
        let mut out = Vec::with_capacity(32);
        match self {
            Self::Issue { ordinal } => put(&mut out, 1, &[*ordinal]),
            Self::Generating { ordinal, attempt } => put(&mut out, 2, &[*ordinal, *attempt]),
            Self::Ready {
                ordinal,
                attempt,
                tokens,
            } => put(&mut out, 3, &[*ordinal, *attempt, *tokens]),
            Self::Lease { lease, ordinals } => {
                put(&mut out, 4, &[*lease]);
                for ordinal in ordinals {
                    varint(&mut out, *ordinal);
                }
            }
            Self::GiveBack { lease } => put(&mut out, 5, &[*lease]),
            Self::Trained {
                lease,
                step,
                trained,
                masked,
            } => put(&mut out, 6, &[*lease, *step, *trained, *masked]),
            Self::Drop {
                ordinal,
                attempt,
                reason,
                tokens,
            } => {
                put(&mut out, 7, &[*ordinal, *attempt, optional(*tokens)]);
                out.extend_from_slice(reason.as_bytes());
            }
            Self::Requeue {
                ordinal,
                reason,
                tokens,
            } => {
                put(&mut out, 8, &[*ordinal, optional(*tokens)]);
                out.extend_from_slice(reason.as_bytes());
            }
            Self::Waste { reason, tokens } => {
                put(&mut out, 9, &[*tokens]);
                out.extend_from_slice(reason.as_bytes());
            }
            Self::Rewind {
                step,
                before,
                trained,
                masked,
                members,
            } => {
                put(&mut out, 10, &[*step, optional(*before), *trained, *masked]);
                for (ordinal, attempt) in members {
                    varint(&mut out, *ordinal);
                    varint(&mut out, *attempt);
                }
            }
            Self::Base(base) => base.bytes(&mut out),
            Self::Part(part) => part.bytes(&mut out),
        }
        out
    }

    /// The event of a record.
    ///
    /// # Errors
    /// `Error::Ledger` when it is none of this format.
    pub(crate) fn of(payload: &[u8]) -> Result<Self> {
        Self::parse(payload).ok_or_else(|| Error::Ledger("it is no event of this format".into()))
    }

    fn parse(payload: &[u8]) -> Option<Self> {
        let (tag, mut rest) = payload.split_first()?;
        let rest = &mut rest;
        let event = match tag {
            1 => Self::Issue {
                ordinal: take(rest)?,
            },
            2 => Self::Generating {
                ordinal: take(rest)?,
                attempt: take(rest)?,
            },
            3 => Self::Ready {
                ordinal: take(rest)?,
                attempt: take(rest)?,
                tokens: take(rest)?,
            },
            4 => {
                let (lease, mut ordinals) = (take(rest)?, Vec::new());
                while !rest.is_empty() {
                    ordinals.push(take(rest)?);
                }
                Self::Lease { lease, ordinals }
            }
            5 => Self::GiveBack { lease: take(rest)? },
            6 => Self::Trained {
                lease: take(rest)?,
                step: take(rest)?,
                trained: take(rest)?,
                masked: take(rest)?,
            },
            7 => {
                let (ordinal, attempt, tokens) =
                    (take(rest)?, take(rest)?, take(rest)?.checked_sub(1));
                Self::Drop {
                    ordinal,
                    attempt,
                    tokens,
                    reason: text(rest)?,
                }
            }
            8 => {
                let (ordinal, tokens) = (take(rest)?, take(rest)?.checked_sub(1));
                Self::Requeue {
                    ordinal,
                    tokens,
                    reason: text(rest)?,
                }
            }
            9 => Self::Waste {
                tokens: take(rest)?,
                reason: text(rest)?,
            },
            10 => {
                let (step, before) = (take(rest)?, take(rest)?.checked_sub(1));
                let (trained, masked, mut members) = (take(rest)?, take(rest)?, Vec::new());
                while !rest.is_empty() {
                    members.push((take(rest)?, take(rest)?));
                }
                Self::Rewind {
                    step,
                    before,
                    trained,
                    masked,
                    members,
                }
            }
            11 => Self::Base(Base::parse(rest)?),
            12 => Self::Part(Part::parse(rest)?),
            _ => return None,
        };
        rest.is_empty().then_some(event)
    }
}

pub(crate) fn put(out: &mut Vec<u8>, tag: u8, numbers: &[u64]) {
    out.push(tag);
    for number in numbers {
        varint(out, *number);
    }
}

/// 0 for none, else the number plus one (numbers are below 2^63).
fn optional(number: Option<u64>) -> u64 {
    number.map_or(0, |number| number.saturating_add(1))
}

pub(crate) fn varint(out: &mut Vec<u8>, mut number: u64) {
    while number >= 0x80 {
        out.push(number as u8 | 0x80);
        number >>= 7;
    }
    out.push(number as u8);
}

pub(crate) fn take(rest: &mut &[u8]) -> Option<u64> {
    let mut number = 0u64;
    for shift in (0..64).step_by(7) {
        let (byte, tail) = rest.split_first()?;
        *rest = tail;
        number |= u64::from(byte & 0x7f) << shift;
        if byte & 0x80 == 0 {
            return Some(number);
        }
    }
    None
}

pub(crate) fn text(rest: &mut &[u8]) -> Option<String> {
    String::from_utf8(std::mem::take(rest).to_vec()).ok()
}
