//! Bindings of `sao_core::wire`.
use pyo3::prelude::*;

/// Adds this topic to the module.
pub fn register(_m: &Bound<'_, PyModule>) -> PyResult<()> {
    Ok(())
}
