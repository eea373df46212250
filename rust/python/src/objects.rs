//! Python objects of a decoded trajectory: `Segment`, `Termination` and `Trajectory` with arrays that are views.
//!
//! The objects are made without their `__post_init__`, which would check again what the decoder has just checked.

use numpy::ndarray::{ArrayView1, ArrayView2};
use numpy::npyffi::NPY_ARRAY_WRITEABLE;
use numpy::{Element, PyArray, PyArray1, PyUntypedArrayMethods};
use pyo3::ffi;
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::{PyBytes, PyDict, PyString, PyTuple, PyType};
use sao_core::sidecar::Sidecar;
use sao_core::trajectory::{Meta, Segment, SegmentKind, Span, TerminationKind, Trajectory};

struct Classes {
    segment: Py<PyType>,
    trajectory: Py<PyType>,
    termination: Py<PyType>,
    finished: Py<PyAny>,
}

static CLASSES: PyOnceLock<Classes> = PyOnceLock::new();

fn classes(py: Python<'_>) -> PyResult<&'static Classes> {
    CLASSES.get_or_try_init(py, || {
        let module = py.import("sao.trajectory")?;
        let class = |name: &str| -> PyResult<Py<PyType>> {
            Ok(module.getattr(name)?.cast_into::<PyType>()?.unbind())
        };
        let termination = class("Termination")?;
        Ok(Classes {
            segment: class("Segment")?,
            trajectory: class("Trajectory")?,
            finished: termination.bind(py).call1(("finished",))?.unbind(),
            termination,
        })
    })
}

/// Sets an attribute past the `__setattr__` of a frozen dataclass, as `object.__setattr__` does.
fn set<'py>(
    object: &Bound<'py, PyAny>,
    name: &Bound<'py, PyString>,
    value: &Bound<'py, PyAny>,
) -> PyResult<()> {
    // SAFETY: all three are live objects, and the call takes no reference of them away.
    let done =
        unsafe { ffi::PyObject_GenericSetAttr(object.as_ptr(), name.as_ptr(), value.as_ptr()) };
    if done == 0 {
        Ok(())
    } else {
        Err(PyErr::fetch(object.py()))
    }
}

/// A read-only array of the elements in `bytes`, a part of the memory that `owner` exports; copied only if misaligned.
fn view<'py, T: Element>(
    owner: &Bound<'py, PyAny>,
    bytes: &[u8],
    element: fn(&[u8]) -> T,
) -> Bound<'py, PyAny> {
    let size = size_of::<T>();
    let data = bytes.as_ptr().cast::<T>();
    let array = if data.is_aligned() {
        // SAFETY: `data` is aligned, and `bytes` holds that many elements, whose bits the decoder has checked to be
        // valid ones (a mask is 0 or 1). They stay while `owner`, the array's base, lives; the array cannot write.
        unsafe {
            let elements = ArrayView1::from_shape_ptr(bytes.len() / size, data);
            PyArray1::borrow_from_array(&elements, owner.clone())
        }
    } else {
        PyArray1::from_iter(owner.py(), bytes.chunks_exact(size).map(element))
    };
    read_only(&array);
    array.into_any()
}

/// Forbids writing to an array that nobody else has seen yet.
fn read_only<T, D>(array: &Bound<'_, PyArray<T, D>>) {
    // SAFETY: a new array, so nobody relies on its flags; the GIL is held.
    unsafe { (*array.as_array_ptr()).flags &= !NPY_ARRAY_WRITEABLE };
}

/// An instance without any attribute, as `object.__new__` makes it.
fn blank<'py>(class: &Bound<'py, PyType>) -> PyResult<Bound<'py, PyAny>> {
    // SAFETY: the type is one of ours, a plain class with slots; the call gives a new reference or null and an error.
    unsafe {
        Bound::from_owned_ptr_or_err(
            class.py(),
            ffi::PyType_GenericAlloc(class.as_ptr().cast(), 0),
        )
    }
}

fn spans<'py>(py: Python<'py>, spans: &[Span]) -> Bound<'py, PyAny> {
    let rows = spans
        .iter()
        .map(|span| [span.start, span.stop, span.version]);
    let rows: Vec<[i64; 3]> = rows.collect();
    let array = PyArray::from_array(py, &ArrayView2::from(&rows[..]));
    read_only(&array);
    array.into_any()
}

fn segment<'py>(owner: &Bound<'py, PyAny>, from: &Segment<'_>) -> PyResult<Bound<'py, PyAny>> {
    let py = owner.py();
    let classes = classes(py)?;
    let object = blank(classes.segment.bind(py))?;
    set(
        &object,
        intern!(py, "kind"),
        match from.kind {
            SegmentKind::Execution => intern!(py, "execution"),
            SegmentKind::Summary => intern!(py, "summary"),
        },
    )?;
    let ids = view(owner, from.token_ids, |b| {
        i32::from_le_bytes([b[0], b[1], b[2], b[3]])
    });
    let mask = view(owner, from.action_mask, |b| b[0] != 0);
    let logprobs = view(owner, from.logprobs, |b| {
        f32::from_le_bytes([b[0], b[1], b[2], b[3]])
    });
    set(&object, intern!(py, "token_ids"), &ids)?;
    set(&object, intern!(py, "action_mask"), &mask)?;
    set(&object, intern!(py, "logprobs"), &logprobs)?;
    set(
        &object,
        intern!(py, "version_spans"),
        &spans(py, &from.version_spans),
    )?;
    Ok(object)
}

fn termination<'py>(py: Python<'py>, from: &Trajectory<'_>) -> PyResult<Bound<'py, PyAny>> {
    let classes = classes(py)?;
    if from.termination == TerminationKind::Finished {
        return Ok(classes.finished.bind(py).clone());
    }
    let object = blank(classes.termination.bind(py))?;
    let text = |text: &str| PyString::new(py, text).into_any();
    set(&object, intern!(py, "kind"), &text(from.termination.name()))?;
    set(&object, intern!(py, "reason"), &text(&from.reason))?;
    Ok(object)
}

/// A read-only array over a frame.
fn array<'py>(frame: &Bound<'py, PyAny>, sidecar: &Sidecar<'_>) -> PyResult<Bound<'py, PyAny>> {
    let numpy = frame.py().import("numpy")?;
    let flat = if sidecar.bytes.is_empty() {
        numpy.call_method1("zeros", (0, &sidecar.dtype))?
    } else {
        numpy.call_method1("frombuffer", (frame, &sidecar.dtype))?
    };
    let shaped = flat.call_method1("reshape", (sidecar.shape.clone(),))?;
    shaped.getattr("flags")?.setattr("writeable", false)?;
    Ok(shaped)
}

/// The `Trajectory` whose arrays lie in `payload`.
pub fn trajectory<'py>(
    payload: &Bound<'py, PyAny>,
    frames: &[Bound<'py, PyAny>],
    from: &Trajectory<'_>,
) -> PyResult<Bound<'py, PyAny>> {
    let py = payload.py();
    let classes = classes(py)?;
    let segments: Vec<_> = from
        .segments
        .iter()
        .map(|from| segment(payload, from))
        .collect::<PyResult<_>>()?;
    let turns = from
        .turn_rewards
        .iter()
        .map(|turn| (turn.segment, turn.position, turn.reward));
    let fingerprints = PyDict::new(py);
    for (version, text) in &from.fingerprints {
        fingerprints.set_item(version, text)?;
    }
    let timings = PyDict::new(py);
    for (name, value) in &from.timings_s {
        timings.set_item(name, value)?;
    }
    let metadata = PyDict::new(py);
    for (name, value) in &from.metadata {
        match value {
            Meta::Null => metadata.set_item(name, py.None())?,
            Meta::Bool(flag) => metadata.set_item(name, flag)?,
            Meta::Int(number) => metadata.set_item(name, number)?,
            Meta::Float(number) => metadata.set_item(name, number)?,
            Meta::Text(text) => metadata.set_item(name, text)?,
        }
    }
    let object = blank(classes.trajectory.bind(py))?;
    let put = |name: &Bound<'py, PyString>, value: Bound<'py, PyAny>| set(&object, name, &value);
    put(intern!(py, "id"), PyBytes::new(py, &from.id).into_any())?;
    put(
        intern!(py, "task_ordinal"),
        from.task_ordinal.into_pyobject(py)?.into_any(),
    )?;
    put(
        intern!(py, "attempt"),
        from.attempt.into_pyobject(py)?.into_any(),
    )?;
    put(intern!(py, "env"), PyString::new(py, &from.env).into_any())?;
    put(
        intern!(py, "segments"),
        PyTuple::new(py, segments)?.into_any(),
    )?;
    put(intern!(py, "reward"), from.reward.into_pyobject(py)?)?;
    put(intern!(py, "termination"), termination(py, from)?)?;
    put(
        intern!(py, "temperature"),
        from.temperature.into_pyobject(py)?.into_any(),
    )?;
    put(
        intern!(py, "turn_rewards"),
        PyTuple::new(py, turns.collect::<Vec<_>>())?.into_any(),
    )?;
    let after = from.after.iter().map(|after| (after.actions, after.next));
    put(
        intern!(py, "after"),
        PyTuple::new(py, after.collect::<Vec<_>>())?.into_any(),
    )?;
    put(intern!(py, "fingerprints"), fingerprints.into_any())?;
    put(intern!(py, "timings_s"), timings.into_any())?;
    put(intern!(py, "metadata"), metadata.into_any())?;
    let sidecars = PyDict::new(py);
    for (sidecar, frame) in from.sidecars.iter().zip(frames) {
        sidecars.set_item(&sidecar.name, array(frame, sidecar)?)?;
    }
    put(intern!(py, "sidecars"), sidecars.into_any())?;
    Ok(object)
}
