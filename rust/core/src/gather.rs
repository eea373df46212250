//! Segments into the rows of a micro-batch, in memory of the caller's, several rows at once.

use crate::{Error, Result};

/// A segment's elements and where they go.
#[derive(Clone, Copy, Debug)]
pub struct Piece<'a> {
    /// Row of the output.
    pub row: usize,
    /// First byte inside the row.
    pub start: usize,
    /// The elements.
    pub bytes: &'a [u8],
}

fn invalid<T>(text: String) -> Result<T> {
    Err(Error::Validation(text))
}

/// Copies every piece to its place in `out`, rows of `row_bytes`, and fills what is between with the element `fill`.
/// Every byte of `out` is written. More than one thread share the rows.
///
/// # Errors
/// [`Error::Validation`] names the first piece that lies outside or overlaps another; nothing was written then.
pub fn gather(
    pieces: &[Piece<'_>],
    out: &mut [u8],
    row_bytes: usize,
    fill: &[u8],
    threads: usize,
) -> Result<()> {
    let rows = out.len().checked_div(row_bytes).unwrap_or(0);
    let mut order: Vec<usize> = (0..pieces.len()).collect();
    order.sort_by_key(|&at| (pieces[at].row, pieces[at].start));
    let (mut row, mut end) = (usize::MAX, 0);
    for &at in &order {
        let piece = &pieces[at];
        let element = fill.len().max(1);
        let stop = piece.start.checked_add(piece.bytes.len());
        let Some(stop) = stop.filter(|stop| *stop <= row_bytes && piece.row < rows) else {
            return invalid(format!(
                "arrays[{at}]: {} elements at {} of row {} do not fit into {rows} rows of {}",
                piece.bytes.len() / element,
                piece.start / element,
                piece.row,
                row_bytes / element
            ));
        };
        if piece.row == row && piece.start < end {
            return invalid(format!(
                "arrays[{at}]: overlaps another at {} of row {row}",
                piece.start / element
            ));
        }
        (row, end) = (piece.row, stop);
    }
    let threads = threads.clamp(1, rows.max(1));
    let share = rows.div_ceil(threads).max(1);
    let order = &order;
    let work = move |first: usize, part: &mut [u8]| {
        let from = order.partition_point(|&at| pieces[at].row < first);
        let mut next = order[from..].iter().map(|&at| &pieces[at]).peekable();
        for (index, out) in part.chunks_exact_mut(row_bytes).enumerate() {
            let mut end = 0;
            while let Some(piece) = next.next_if(|piece| piece.row == first + index) {
                pad(&mut out[end..piece.start], fill);
                end = piece.start + piece.bytes.len();
                out[piece.start..end].copy_from_slice(piece.bytes);
            }
            pad(&mut out[end..], fill);
        }
    };
    if rows == 0 {
        return Ok(());
    }
    let mut parts = out[..rows * row_bytes]
        .chunks_mut(share * row_bytes)
        .enumerate();
    let own = parts.next();
    std::thread::scope(|scope| {
        for (index, part) in parts {
            scope.spawn(move || work(index * share, part));
        }
        if let Some((_, part)) = own {
            work(0, part);
        }
    });
    Ok(())
}

fn pad(out: &mut [u8], fill: &[u8]) {
    match fill {
        [first, rest @ ..] if rest.iter().any(|byte| byte != first) => {
            for element in out.chunks_exact_mut(fill.len()) {
                element.copy_from_slice(fill);
            }
        }
        _ => out.fill(fill.first().copied().unwrap_or(0)),
    }
}

#[cfg(test)]
mod tests {
    use super::{gather, Piece};
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn it_is_a_loop_over_elements(
            lengths in prop::collection::vec(prop::collection::vec(0usize..9, 0..4), 1..7),
            fill in any::<[u8; 4]>(),
            threads in 1usize..5,
        ) {
            let data: Vec<u8> = (0..=255).cycle().take(4 * 64).collect();
            let (width, mut pieces, mut want) = (40, Vec::new(), Vec::new());
            for (row, row_lengths) in lengths.iter().enumerate() {
                let mut filled = vec![fill; width];
                let mut at = 1;
                for &length in row_lengths {
                    let bytes = &data[4 * at..4 * (at + length)];
                    pieces.push(Piece { row, start: 4 * at, bytes });
                    for (to, from) in filled[at..].iter_mut().zip(bytes.as_chunks::<4>().0) {
                        *to = *from;
                    }
                    at += length + 1;
                }
                want.extend(filled.concat());
            }
            pieces.reverse();
            let mut out = vec![99; want.len()];
            gather(&pieces, &mut out, 4 * width, &fill, threads).unwrap();
            prop_assert_eq!(out, want);
        }
    }

    #[test]
    fn what_does_not_fit_is_named_and_nothing_is_written() {
        let piece = |row, start| Piece {
            row,
            start,
            bytes: &[1, 2, 3, 4],
        };
        for (pieces, text) in [
            (
                vec![piece(0, 0), piece(2, 0)],
                "arrays[1]: 2 elements at 0 of row 2 do not fit into 2 rows of 4",
            ),
            (
                vec![piece(0, 6)],
                "arrays[0]: 2 elements at 3 of row 0 do not fit",
            ),
            (
                vec![piece(1, 4), piece(1, 2)],
                "overlaps another at 2 of row 1",
            ),
            (vec![piece(0, usize::MAX)], "do not fit"),
        ] {
            let mut out = [7; 16];
            let error = gather(&pieces, &mut out, 8, &[0, 0], 2)
                .unwrap_err()
                .to_string();
            assert!(error.contains(text), "{error}");
            assert_eq!(out, [7; 16]);
        }
        gather(&[], &mut [], 0, &[0], 3).unwrap();
    }
}
