//! Where the arrays of a trajectory lie in its payload.

use crate::error::{Error, Result};

/// Arrays start at multiples of this many bytes in the payload.
pub const ALIGNMENT: usize = 64;

/// Where the arrays of one segment lie in the payload.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Place {
    /// Of `token_ids`, `logprobs` and `action_mask`, bytes.
    pub offsets: [usize; 3],
    /// Tokens of the segment.
    pub tokens: usize,
}

impl Place {
    pub(crate) fn sizes(self) -> [usize; 3] {
        [4 * self.tokens, 4 * self.tokens, self.tokens]
    }

    pub(crate) fn end(self) -> usize {
        self.offsets[2] + self.tokens
    }

    /// The place that follows `before` and holds `tokens` tokens; `None` when the offsets overflow.
    pub(crate) fn after(before: usize, tokens: usize) -> Option<Self> {
        let ids = before.checked_next_multiple_of(ALIGNMENT)?;
        let array = tokens.checked_mul(4)?;
        let logs = ids
            .checked_add(array)?
            .checked_next_multiple_of(ALIGNMENT)?;
        let mask = logs
            .checked_add(array)?
            .checked_next_multiple_of(ALIGNMENT)?;
        mask.checked_add(tokens)?;
        Some(Self {
            offsets: [ids, logs, mask],
            tokens,
        })
    }
}

/// Where the arrays of segments of these lengths lie, and the length of the payload in bytes.
///
/// # Errors
/// `Error::Validation` when the sizes overflow.
pub fn layout(tokens: impl IntoIterator<Item = usize>) -> Result<(Vec<Place>, usize)> {
    let (mut places, mut end) = (Vec::new(), 0);
    for (index, tokens) in tokens.into_iter().enumerate() {
        let place = Place::after(end, tokens).ok_or_else(|| {
            Error::Validation(format!("segments[{index}]: {tokens} tokens are too many"))
        })?;
        end = place.end();
        places.push(place);
    }
    Ok((places, end))
}
