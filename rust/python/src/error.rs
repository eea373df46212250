//! The one place where core errors and panics become Python exceptions.
// Usage in a binding: `core_call().map_err(to_py)?`, or `guard(|| core_call())?` where a bug must not reach Python as a
// `PanicException` (which `except Exception` does not catch).

use std::panic::{catch_unwind, AssertUnwindSafe};

use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::PyType;

struct Classes {
    base: Py<PyType>,
    validation: Py<PyType>,
    wire: Py<PyType>,
    closed: Py<PyType>,
    deadline: Py<PyType>,
    full: Py<PyType>,
    ledger: Py<PyType>,
    transport: Py<PyType>,
}

static CLASSES: PyOnceLock<Classes> = PyOnceLock::new();

fn classes(py: Python<'_>) -> PyResult<&'static Classes> {
    CLASSES.get_or_try_init(py, || {
        let module = py.import("sao.errors")?;
        let get = |name: &str| -> PyResult<Py<PyType>> {
            Ok(module.getattr(name)?.cast_into::<PyType>()?.unbind())
        };
        Ok(Classes {
            base: get("Error")?,
            validation: get("ValidationError")?,
            wire: get("WireError")?,
            closed: get("ClosedError")?,
            deadline: get("DeadlineError")?,
            full: get("FullError")?,
            ledger: get("LedgerError")?,
            transport: get("TransportError")?,
        })
    })
}

fn raise(pick: impl FnOnce(&Classes) -> &Py<PyType>, text: String) -> PyErr {
    Python::attach(|py| match classes(py) {
        Ok(all) => PyErr::from_type(pick(all).bind(py).clone(), text),
        Err(error) => error,
    })
}

/// The Python exception of a core error. Takes the GIL itself, so it may be called with or without it.
#[allow(clippy::needless_pass_by_value)] // by value so that `map_err(to_py)` reads well
pub fn to_py(error: sao_core::Error) -> PyErr {
    use sao_core::Error as E;
    let text = error.to_string();
    match error {
        E::Validation(_) => raise(|c| &c.validation, text),
        E::Wire(_) => raise(|c| &c.wire, text),
        E::Closed(_) => raise(|c| &c.closed, text),
        E::Deadline(_) => raise(|c| &c.deadline, text),
        E::Interrupted(_) => pyo3::exceptions::PyKeyboardInterrupt::new_err(text),
        E::Full(_) => raise(|c| &c.full, text),
        E::Ledger(_) => raise(|c| &c.ledger, text),
        E::Transport(_) => raise(|c| &c.transport, text),
    }
}

/// A `sao.errors.ValidationError` with this text.
pub fn validation(text: impl Into<String>) -> PyErr {
    raise(|c| &c.validation, text.into())
}

/// Runs a core call; its error becomes the matching `sao.errors` class and a panic becomes `sao.errors.Error`.
pub fn guard<T>(call: impl FnOnce() -> sao_core::Result<T>) -> PyResult<T> {
    match catch_unwind(AssertUnwindSafe(call)) {
        Ok(result) => result.map_err(to_py),
        Err(payload) => {
            let text = payload
                .downcast_ref::<String>()
                .map(String::as_str)
                .or_else(|| payload.downcast_ref::<&str>().copied())
                .unwrap_or("unknown panic");
            Err(raise(
                |c| &c.base,
                format!("internal error of the native core: {text}"),
            ))
        }
    }
}
