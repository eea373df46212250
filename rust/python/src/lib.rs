//! Python bindings of `sao-core`: thin, one file a topic, errors mapped in `error.rs`.
// One `register(m)` per topic keeps this file a table of contents.

use pyo3::prelude::*;

mod advantage;
mod argument;
mod buffer;
mod call;
mod error;
mod ledger;
mod lend;
mod objects;
mod pack;
mod staleness;
mod wire;

/// The native core of `sao`.
#[pymodule(gil_used = false)]
fn _core(m: &Bound<'_, PyModule>) -> PyResult<()> {
    wire::register(m)?;
    ledger::register(m)?;
    buffer::register(m)?;
    staleness::register(m)?;
    pack::register(m)?;
    advantage::register(m)?;
    Ok(())
}
