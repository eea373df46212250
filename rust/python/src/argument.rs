//! How arguments come in: arrays are one-dimensional, contiguous and of exactly the dtype that is named, or a `TypeError`; numbers
//! are in range, or a `ValidationError`.

use numpy::{
    Element, PyArray1, PyArrayDescrMethods, PyArrayMethods, PyReadonlyArray1, PyUntypedArray,
    PyUntypedArrayMethods,
};
use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;

use crate::error::validation;

/// `object` as a contiguous 1-D array of `T`.
pub fn array<'py, T: Element>(
    name: &str,
    object: &Bound<'py, PyAny>,
) -> PyResult<PyReadonlyArray1<'py, T>> {
    let wanted = numpy::dtype::<T>(object.py());
    let wrong = |got: String| {
        PyTypeError::new_err(format!(
            "{name}: expected a contiguous 1-D array of {wanted}, got {got}"
        ))
    };
    let Ok(untyped) = object.cast::<PyUntypedArray>() else {
        return Err(wrong(object.get_type().name()?.to_string()));
    };
    // Only for an error: naming a dtype runs Python code.
    let got = || {
        let layout = if untyped.is_c_contiguous() {
            "contiguous"
        } else {
            "strided"
        };
        format!(
            "a {layout} {}-D array of {}",
            untyped.ndim(),
            untyped.dtype()
        )
    };
    match object.cast::<PyArray1<T>>() {
        Ok(typed) if typed.is_c_contiguous() && typed.dtype().is_equiv_to(&wanted) => typed
            .try_readonly()
            .map_err(|_| wrong("one that is being written to".into())),
        _ => Err(wrong(got())),
    }
}

/// `object` as a mask: `bool` or `uint8`, not 0 is true.
pub fn mask<'py>(name: &str, object: &Bound<'py, PyAny>) -> PyResult<PyReadonlyArray1<'py, u8>> {
    match object.cast::<PyUntypedArray>() {
        Ok(untyped)
            if untyped
                .dtype()
                .is_equiv_to(&numpy::dtype::<bool>(object.py())) =>
        {
            // A bool array may hold bytes other than 0 and 1; as bytes they are harmless.
            array(name, &object.call_method1("view", ("uint8",))?)
        }
        _ => array(name, object),
    }
}

/// `value` as a count of at least `least`, which is not negative.
pub fn count<T: TryFrom<i64>>(name: &str, value: i64, least: i64) -> PyResult<T> {
    let wrong = || validation(format!("{name}: {value} must be at least {least}"));
    if value < least {
        return Err(wrong());
    }
    T::try_from(value).map_err(|_| wrong())
}
