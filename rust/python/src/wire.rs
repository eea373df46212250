//! Bindings of `sao_core::{trajectory, wire}`: Python objects in, checked bytes out, and back.

use std::ffi::CStr;

use pyo3::buffer::PyUntypedBuffer;
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyBool, PyBytes, PyDict, PyFloat, PyInt, PyMemoryView, PyString, PyTuple};
use sao_core::layout::Place;
use sao_core::sidecar::{Sidecar, MAX_SIDECARS};
use sao_core::trajectory::{
    After, Meta, Segment, SegmentKind, Span, TerminationKind, Trajectory, TurnReward,
};
use sao_core::wire::{self, Limits};

use crate::call::run;
use crate::error::{guard, validation};
use crate::lend;
use crate::objects;

/// Payloads longer than this are worked on without the GIL; for less (some 20 us) giving it up costs more than it gives
/// others, since a busy thread hands it back only after its switch interval.
const DETACH_BYTES: usize = 1 << 19;

/// A contiguous buffer, borrowed from Python for as long as this lives; `owner` keeps it beyond that.
struct Bytes {
    buffer: PyUntypedBuffer,
    owner: Py<PyMemoryView>,
}

impl Bytes {
    fn any(object: &Bound<'_, PyAny>, field: &str) -> PyResult<Self> {
        // Through a memoryview, which fills in what some exporters (zmq.Frame) leave out.
        let view = PyMemoryView::from(object).map_err(|_| {
            validation(format!(
                "{field}: {} has no buffer; expected bytes, memoryview, zmq.Frame or an array",
                type_name(object)
            ))
        })?;
        let buffer = PyUntypedBuffer::get(&view)
            .map_err(|error| validation(format!("{field}: {}: {error}", type_name(object))))?;
        if !buffer.is_c_contiguous() {
            return Err(validation(format!(
                "{field}: strides {:?} for shape {:?}, expected a contiguous buffer",
                buffer.strides(),
                buffer.shape()
            )));
        }
        Ok(Self {
            buffer,
            owner: view.unbind(),
        })
    }

    /// As `any`, with a check of the element type.
    fn array(
        object: &Bound<'_, PyAny>,
        field: &str,
        dims: usize,
        formats: &[&CStr],
        dtype: &str,
    ) -> PyResult<Self> {
        let bytes = Self::any(object, field)?;
        if !formats.contains(&bytes.buffer.format()) || bytes.buffer.dimensions() != dims {
            return Err(validation(format!(
                "{field}: {} dimension(s) of format {:?}, expected {dims} of {dtype}",
                bytes.buffer.dimensions(),
                bytes.buffer.format()
            )));
        }
        Ok(bytes)
    }

    fn slice(&self) -> &[u8] {
        // A writable buffer is only read while the GIL is held (`frozen`), so that Python code cannot change it meanwhile.
        lend::bytes(&self.buffer)
    }

    fn frozen(&self) -> bool {
        self.buffer.readonly()
    }
}

pub fn type_name(object: &Bound<'_, PyAny>) -> String {
    object
        .get_type()
        .name()
        .map_or_else(|_| "object".into(), |name| name.to_string())
}

fn get<'py, T>(object: &Bound<'py, PyAny>, field: &str, expected: &str) -> PyResult<T>
where
    T: for<'a> FromPyObject<'a, 'py>,
{
    let value = object.getattr(field)?;
    value.extract().map_err(|_| wrong(&value, field, expected))
}

fn wrong(value: &Bound<'_, PyAny>, field: &str, expected: &str) -> PyErr {
    let shown = value
        .repr()
        .map_or_else(|_| "?".into(), |text| text.to_string());
    let shown: String = shown.chars().take(80).collect();
    validation(format!("{field}: {shown} is not {expected}"))
}

/// The buffers of one segment; `view` borrows from them.
pub struct SegmentBuffers {
    kind: SegmentKind,
    token_ids: Bytes,
    action_mask: Bytes,
    logprobs: Bytes,
    spans: Vec<Span>,
}

impl SegmentBuffers {
    fn extract(object: &Bound<'_, PyAny>, prefix: &str) -> PyResult<Self> {
        let py = object.py();
        let name: String = get(object, "kind", "\"execution\" or \"summary\"")?;
        let kind = SegmentKind::parse(&name).ok_or_else(|| {
            validation(format!(
                "{prefix}kind: {name:?}, expected \"execution\" or \"summary\""
            ))
        })?;
        let array = |name: &Bound<'_, PyString>, dims, formats: &[&CStr], dtype| {
            Bytes::array(
                &object.getattr(name)?,
                &format!("{prefix}{name}"),
                dims,
                formats,
                dtype,
            )
        };
        let token_ids = array(intern!(py, "token_ids"), 1, &[c"i", c"<i"], "int32")?;
        let action_mask = array(intern!(py, "action_mask"), 1, &[c"?"], "bool")?;
        let logprobs = array(intern!(py, "logprobs"), 1, &[c"f", c"<f"], "float32")?;
        let spans = array(
            intern!(py, "version_spans"),
            2,
            &[c"l", c"<l", c"q", c"<q"],
            "int64",
        )?;
        if spans.buffer.shape()[1] != 3 {
            return Err(validation(format!(
                "{prefix}version_spans: shape {:?}, expected (k, 3)",
                spans.buffer.shape()
            )));
        }
        let numbers: Vec<i64> = spans
            .slice()
            .chunks_exact(8)
            .map(|b| i64::from_le_bytes([b[0], b[1], b[2], b[3], b[4], b[5], b[6], b[7]]))
            .collect();
        let spans = numbers
            .chunks_exact(3)
            .map(|row| Span {
                start: row[0],
                stop: row[1],
                version: row[2],
            })
            .collect();
        Ok(Self {
            kind,
            token_ids,
            action_mask,
            logprobs,
            spans,
        })
    }

    fn view(&self) -> Segment<'_> {
        Segment {
            kind: self.kind,
            token_ids: self.token_ids.slice(),
            logprobs: self.logprobs.slice(),
            action_mask: self.action_mask.slice(),
            version_spans: self.spans.clone(),
        }
    }
}

/// The arrays of a trajectory, borrowed.
pub struct Arrays {
    segments: Vec<SegmentBuffers>,
    sidecars: Vec<SidecarBuffer>,
}

/// As `sao_core::sidecar::Sidecar`.
struct SidecarBuffer {
    name: String,
    dtype: String,
    shape: Vec<u64>,
    elements: Bytes,
}

impl Arrays {
    /// Whether nobody can write to the arrays while they are worked on without the GIL.
    pub fn frozen(&self) -> bool {
        let segments = self
            .segments
            .iter()
            .all(|b| b.token_ids.frozen() && b.action_mask.frozen() && b.logprobs.frozen());
        segments
            && self
                .sidecars
                .iter()
                .all(|sidecar| sidecar.elements.frozen())
    }
}

/// The arrays of all segments and all sidecars.
pub fn arrays(trajectory: &Bound<'_, PyAny>) -> PyResult<Arrays> {
    let py = trajectory.py();
    let value = trajectory
        .getattr(intern!(py, "sidecars"))
        .map_err(|_| wrong(&trajectory.get_type(), "trajectory", "a sao.Trajectory"))?;
    let map = value
        .cast::<PyDict>()
        .map_err(|_| wrong(&value, "sidecars", "a dict of arrays"))?;
    let mut sidecars = Vec::with_capacity(map.len());
    for (key, array) in map.iter() {
        let name: String = key
            .extract()
            .map_err(|_| wrong(&key, "sidecars", "a name"))?;
        let dtype: Bound<'_, PyAny> = array.getattr("dtype")?;
        let flat = array.call_method1("reshape", (-1,))?;
        sidecars.push(SidecarBuffer {
            dtype: get(&dtype, "name", "text")?,
            shape: get(&array, "shape", "a shape")?,
            elements: Bytes::any(&flat, &format!("sidecars[{name:?}]"))?,
            name,
        });
    }
    Ok(Arrays {
        segments: segments(trajectory)?,
        sidecars,
    })
}

fn segments(trajectory: &Bound<'_, PyAny>) -> PyResult<Vec<SegmentBuffers>> {
    let list = trajectory.getattr("segments")?;
    let list = list
        .cast::<PyTuple>()
        .map_err(|_| wrong(&list, "segments", "a tuple of Segment"))?;
    let buffers = list.iter().enumerate();
    buffers
        .map(|(index, segment)| SegmentBuffers::extract(&segment, &format!("segments[{index}].")))
        .collect()
}

/// The trajectory with its arrays borrowed from `buffers`.
pub fn extract<'a>(object: &Bound<'_, PyAny>, buffers: &'a Arrays) -> PyResult<Trajectory<'a>> {
    let id: Vec<u8> = get(object, "id", "16 bytes")?;
    let length = id.len();
    let id = id
        .try_into()
        .map_err(|_| validation(format!("id: {length} bytes, expected 16")))?;
    let termination = object.getattr("termination")?;
    let kind: String = get(&termination, "kind", "a termination kind")?;
    let Some(kind) = TerminationKind::parse(&kind) else {
        return Err(validation(format!(
            "termination.kind: {kind:?}, expected \"finished\", \"truncated\" or \"failed\""
        )));
    };
    let turns: Vec<(i64, i64, f64)> = get(
        object,
        "turn_rewards",
        "a tuple of (segment, position, reward)",
    )?;
    let turn_rewards = turns
        .into_iter()
        .map(|(segment, position, reward)| TurnReward {
            segment,
            position,
            reward,
        })
        .collect();
    let after: Vec<(i64, i64)> = get(object, "after", "a tuple of (action tokens, segment)")?;
    let after = after
        .into_iter()
        .map(|(actions, next)| After { actions, next })
        .collect();
    Ok(Trajectory {
        id,
        task_ordinal: get(object, "task_ordinal", "a 64-bit integer")?,
        attempt: get(object, "attempt", "a 64-bit integer")?,
        env: get(object, "env", "text")?,
        segments: buffers.segments.iter().map(SegmentBuffers::view).collect(),
        reward: get(object, "reward", "a number or None")?,
        termination: kind,
        reason: get(&termination, "reason", "text")?,
        temperature: get(object, "temperature", "a number")?,
        turn_rewards,
        after,
        fingerprints: entries(object, "fingerprints", "a policy version: text", |v| {
            v.extract().ok()
        })?,
        timings_s: entries(object, "timings_s", "text: seconds", |v| v.extract().ok())?,
        metadata: entries(
            object,
            "metadata",
            "text: str, 64-bit int, float, bool or None",
            meta,
        )?,
        sidecars: buffers
            .sidecars
            .iter()
            .map(|sidecar| Sidecar {
                name: sidecar.name.clone(),
                dtype: sidecar.dtype.clone(),
                shape: sidecar.shape.clone(),
                bytes: sidecar.elements.slice(),
            })
            .collect(),
    })
}

fn entries<'py, K, V>(
    object: &Bound<'py, PyAny>,
    field: &str,
    expected: &str,
    read: impl Fn(&Bound<'py, PyAny>) -> Option<V>,
) -> PyResult<Vec<(K, V)>>
where
    K: for<'a> FromPyObject<'a, 'py>,
{
    let value = object.getattr(field)?;
    let map = value
        .cast::<PyDict>()
        .map_err(|_| wrong(&value, field, "a dict"))?;
    map.iter()
        .map(|(key, value)| match (key.extract().ok(), read(&value)) {
            (Some(key), Some(value)) => Ok((key, value)),
            _ => Err(validation(format!(
                "{field}[{}]: {}, expected {expected}",
                key.repr()?,
                value.repr()?
            ))),
        })
        .collect()
}

fn meta(value: &Bound<'_, PyAny>) -> Option<Meta> {
    if value.is_none() {
        Some(Meta::Null)
    } else if let Ok(flag) = value.cast::<PyBool>() {
        Some(Meta::Bool(flag.is_true()))
    } else if value.is_instance_of::<PyInt>() {
        value.extract().ok().map(Meta::Int)
    } else if value.is_instance_of::<PyFloat>() {
        value.extract().ok().map(Meta::Float)
    } else {
        value.extract().ok().map(Meta::Text)
    }
}

/// Checks one segment; raises `ValidationError`.
#[pyfunction]
fn check_segment(segment: &Bound<'_, PyAny>) -> PyResult<()> {
    let buffers = SegmentBuffers::extract(segment, "")?;
    guard(|| buffers.view().check(&"")).map(drop)
}

/// Checks the fields of a trajectory whose segments were checked when they were built; raises `ValidationError`.
#[pyfunction]
fn check_trajectory(trajectory: &Bound<'_, PyAny>, n_actions: usize) -> PyResult<()> {
    let buffers = arrays(trajectory)?;
    let view = extract(trajectory, &buffers)?;
    guard(|| view.check_fields(n_actions))
}

/// Checks and encodes a trajectory: (header, payload).
#[pyfunction]
fn encode<'py>(
    py: Python<'py>,
    trajectory: &Bound<'py, PyAny>,
) -> PyResult<(Bound<'py, PyBytes>, Bound<'py, PyBytes>)> {
    let buffers = arrays(trajectory)?;
    let view = extract(trajectory, &buffers)?;
    let frozen = buffers.frozen();
    let (places, length) =
        guard(|| sao_core::layout::layout(view.segments.iter().map(|s| s.action_mask.len())))?;
    let mut header = Vec::new();
    let payload = PyBytes::new_with(py, length, |out| {
        header = run(py, frozen && length > DETACH_BYTES, || {
            wire::encode_into(&view, &places, out)
        })?;
        Ok(())
    })?;
    Ok((PyBytes::new(py, &header), payload))
}

fn foreign(error: &PyErr, py: Python<'_>) -> PyErr {
    crate::error::to_py(sao_core::Error::Wire(error.value(py).to_string()))
}

/// The bytes of a frame that came in.
enum Received<'py> {
    /// Never change and need no release.
    Fixed(Bound<'py, PyBytes>),
    Lent(Bytes),
}

impl<'py> Received<'py> {
    fn new(object: &Bound<'py, PyAny>, field: &str) -> PyResult<Self> {
        if let Ok(bytes) = object.cast_exact::<PyBytes>() {
            return Ok(Self::Fixed(bytes.clone()));
        }
        let lent = Bytes::any(object, field).map_err(|error| foreign(&error, object.py()))?;
        Ok(Self::Lent(lent))
    }

    fn slice(&self) -> &[u8] {
        match self {
            Self::Fixed(bytes) => bytes.as_bytes(),
            Self::Lent(bytes) => bytes.slice(),
        }
    }

    fn frozen(&self) -> bool {
        match self {
            Self::Fixed(_) => true,
            Self::Lent(bytes) => bytes.frozen(),
        }
    }

    /// The object that keeps the bytes.
    fn owner(&self, py: Python<'py>) -> Bound<'py, PyAny> {
        match self {
            Self::Fixed(bytes) => bytes.clone().into_any(),
            Self::Lent(bytes) => bytes.owner.bind(py).clone().into_any(),
        }
    }
}

fn frames<'py>(objects: Option<Vec<Bound<'py, PyAny>>>) -> PyResult<Vec<Received<'py>>> {
    let frame = |(index, object): (usize, Bound<'py, PyAny>)| {
        Received::new(&object, &format!("sidecars[{index}]"))
    };
    let objects = objects.unwrap_or_default();
    objects.into_iter().enumerate().map(frame).collect()
}

fn decode_checked<'a>(
    py: Python<'_>,
    header: &'a Received<'_>,
    payload: &'a Received<'_>,
    sidecars: &'a [Received<'_>],
    limits: Limits,
) -> PyResult<(Trajectory<'a>, Vec<Place>)> {
    let (head, body) = (header.slice(), payload.slice());
    let sides: Vec<&'a [u8]> = sidecars.iter().map(Received::slice).collect();
    let frozen = header.frozen() && payload.frozen() && sidecars.iter().all(Received::frozen);
    run(py, frozen && body.len() > DETACH_BYTES, || {
        wire::decode_with(head, body, &sides, limits)
    })
}

/// Checks header and payload and returns the `sao.Trajectory`, whose arrays are views of `payload`. Raises `WireError`.
#[pyfunction]
#[pyo3(signature = (header, payload, max_bytes, max_segments, sidecars=None))]
fn decode<'py>(
    py: Python<'py>,
    header: &Bound<'py, PyAny>,
    payload: &Bound<'py, PyAny>,
    max_bytes: usize,
    max_segments: usize,
    sidecars: Option<Vec<Bound<'py, PyAny>>>,
) -> PyResult<Bound<'py, PyAny>> {
    let sidecars = frames(sidecars)?;
    let header = Received::new(header, "header")?;
    let payload = Received::new(payload, "payload")?;
    let limits = Limits {
        max_bytes,
        max_segments,
    };
    let (found, _) = decode_checked(py, &header, &payload, &sidecars, limits)?;
    let owners: Vec<_> = sidecars.iter().map(|frame| frame.owner(py)).collect();
    objects::trajectory(&payload.owner(py), &owners, &found)
}

/// Reads a header alone (or, with the payload, checks all of both) and returns its facts. Raises `WireError`.
#[pyfunction]
#[pyo3(signature = (header, payload = None, *, max_bytes = wire::DEFAULT_MAX_BYTES, max_segments = wire::DEFAULT_MAX_SEGMENTS, sidecars = None))]
fn summary<'py>(
    py: Python<'py>,
    header: &Bound<'py, PyAny>,
    payload: Option<&Bound<'py, PyAny>>,
    max_bytes: usize,
    max_segments: usize,
    sidecars: Option<Vec<Bound<'py, PyAny>>>,
) -> PyResult<Bound<'py, PyDict>> {
    let limits = Limits {
        max_bytes,
        max_segments,
    };
    let header = Received::new(header, "header")?;
    if let Some(payload) = payload {
        let payload = Received::new(payload, "payload")?;
        decode_checked(py, &header, &payload, &frames(sidecars)?, limits)?;
    }
    let found = guard(|| wire::summary(header.slice(), limits))?;
    let out = PyDict::new(py);
    out.set_item("id", PyBytes::new(py, &found.id))?;
    out.set_item("task_ordinal", found.task_ordinal)?;
    out.set_item("attempt", found.attempt)?;
    out.set_item("env", found.env)?;
    out.set_item("n_tokens", found.counts.tokens)?;
    out.set_item("n_actions", found.counts.actions)?;
    out.set_item("n_segments", found.n_segments)?;
    out.set_item("min_version", found.counts.min_version)?;
    out.set_item("max_version", found.counts.max_version)?;
    out.set_item("termination", found.termination.name())?;
    out.set_item("reason", found.reason)?;
    out.set_item("reward", found.reward)?;
    let fingerprints: std::collections::BTreeMap<i64, String> =
        found.fingerprints.into_iter().collect();
    out.set_item("fingerprints", fingerprints)?;
    out.set_item("payload_bytes", found.payload_bytes)?;
    let sidecars = PyDict::new(py);
    for (name, bytes) in found.sidecars {
        sidecars.set_item(name, bytes)?;
    }
    out.set_item("sidecars", sidecars)?;
    Ok(out)
}

/// Adds this topic to the module.
pub fn register(m: &Bound<'_, PyModule>) -> PyResult<()> {
    m.add_function(wrap_pyfunction!(check_segment, m)?)?;
    m.add_function(wrap_pyfunction!(check_trajectory, m)?)?;
    m.add_function(wrap_pyfunction!(encode, m)?)?;
    m.add_function(wrap_pyfunction!(decode, m)?)?;
    m.add_function(wrap_pyfunction!(summary, m)?)?;
    m.add("MAX_PAYLOAD_BYTES", wire::DEFAULT_MAX_BYTES)?;
    m.add("MAX_SEGMENTS", wire::DEFAULT_MAX_SEGMENTS)?;
    m.add("MAX_HEADER_BYTES", wire::MAX_HEADER_BYTES)?;
    m.add("MAX_SIDECARS", MAX_SIDECARS)
}
