//! Bindings of `sao_core::advantage`.

use numpy::{IntoPyArray, PyArray1, PyArrayMethods, PyReadonlyArray1};
use pyo3::prelude::*;
use sao_core::advantage::{self, Batch, CrossSegment, Lambda, Parameters};

use crate::argument::{array, mask};
use crate::call::run;
use crate::error::validation;

/// Above this many tokens the GIL is released.
const DETACH_TOKENS: usize = 100_000;

/// Up to this many tokens all is done in the nearest cache.
const CACHED_TOKENS: usize = 1 << 15;
/// From this many tokens on, `NumPy` asks for huge pages of fresh memory, which is 0 without being written.
const FRESH_TOKENS: usize = (4 << 20) / size_of::<f32>();

type Outputs<'py> = (
    Bound<'py, PyArray1<f32>>,
    Bound<'py, PyArray1<f32>>,
    Bound<'py, PyArray1<f64>>,
);
type After<'py> = (PyReadonlyArray1<'py, i64>, PyReadonlyArray1<'py, i64>);
type Turns<'py> = (PyReadonlyArray1<'py, i64>, PyReadonlyArray1<'py, f32>);

/// An array that is 0, or one of whatever was in the memory, if every element of it is written anyway.
fn output(py: Python<'_>, tokens: usize, written: bool) -> PyResult<Bound<'_, PyArray1<f32>>> {
    if !written {
        return Ok(PyArray1::zeros(py, tokens, false));
    }
    let empty = py.import("numpy")?.call_method1("empty", (tokens, "f4"))?;
    Ok(empty.cast_into()?)
}

#[pyfunction]
#[pyo3(signature = (
    values, action_mask, segment_offsets, trajectory_offsets, rewards, *, gamma, lambda_policy, lambda_alpha,
    lambda_critic, cross_segment="paper", skip_observations=true, bootstrap=None, turn_rewards=None,
    after=None
))]
#[allow(clippy::too_many_arguments, clippy::needless_pass_by_value)] // arguments of the Python function
fn advantages<'py>(
    values: &Bound<'py, PyAny>,
    action_mask: &Bound<'py, PyAny>,
    segment_offsets: &Bound<'py, PyAny>,
    trajectory_offsets: &Bound<'py, PyAny>,
    rewards: &Bound<'py, PyAny>,
    gamma: f64,
    lambda_policy: Option<f64>,
    lambda_alpha: f64,
    lambda_critic: f64,
    cross_segment: &str,
    skip_observations: bool,
    bootstrap: Option<&Bound<'py, PyAny>>,
    turn_rewards: Option<(Bound<'py, PyAny>, Bound<'py, PyAny>)>,
    after: Option<(Bound<'py, PyAny>, Bound<'py, PyAny>)>,
) -> PyResult<Outputs<'py>> {
    let py = values.py();
    let parameters = Parameters {
        gamma,
        lambda_policy: lambda_policy.map_or(
            Lambda::Adaptive {
                alpha: lambda_alpha,
            },
            Lambda::Fixed,
        ),
        lambda_critic,
        cross_segment: match cross_segment {
            "paper" => CrossSegment::Paper,
            "chained" => CrossSegment::Chained,
            "none" => CrossSegment::Independent,
            other => {
                return Err(validation(format!(
                    "cross_segment: {other:?} is not paper, chained or none"
                )))
            }
        },
        skip_observations,
    };
    let values = array::<f32>("values", values)?;
    let action_mask = mask("action_mask", action_mask)?;
    let segment_offsets = array::<i64>("segment_offsets", segment_offsets)?;
    let trajectory_offsets = array::<i64>("trajectory_offsets", trajectory_offsets)?;
    let rewards = array::<f32>("rewards", rewards)?;
    let bootstrap = bootstrap
        .map(|values| array::<f32>("bootstrap", values))
        .transpose()?;
    let turns: Option<Turns<'py>> = match &turn_rewards {
        Some((at, of)) => Some((array("turn_rewards[0]", at)?, array("turn_rewards[1]", of)?)),
        None => None,
    };
    let after: Option<After<'py>> = match &after {
        Some((later, next)) => Some((array("after[0]", later)?, array("after[1]", next)?)),
        None => None,
    };
    let batch = Batch {
        values: values.as_slice()?,
        action_mask: action_mask.as_slice()?,
        segment_offsets: segment_offsets.as_slice()?,
        trajectory_offsets: trajectory_offsets.as_slice()?,
        rewards: rewards.as_slice()?,
        bootstrap: bootstrap
            .as_ref()
            .map(|values| values.as_slice())
            .transpose()?,
        after: match &after {
            Some((later, next)) => Some((later.as_slice()?, next.as_slice()?)),
            None => None,
        },
        turn_rewards: match &turns {
            Some((at, of)) => (at.as_slice()?, of.as_slice()?),
            None => (&[], &[]),
        },
    };
    let tokens = batch.values.len();
    let clear = (CACHED_TOKENS..FRESH_TOKENS).contains(&tokens);
    let (out, targets) = (output(py, tokens, clear)?, output(py, tokens, clear)?);
    let (mut out_view, mut target_view) = (out.readwrite(), targets.readwrite());
    let (out_slice, target_slice) = (out_view.as_slice_mut()?, target_view.as_slice_mut()?);
    let lambdas = run(py, tokens > DETACH_TOKENS, || {
        advantage::advantages(&batch, &parameters, clear, out_slice, target_slice)
    })?;
    drop((out_view, target_view));
    Ok((out, targets, lambdas.into_pyarray(py)))
}

/// Adds this topic to the module.
pub fn register(m: &Bound<'_, PyModule>) -> PyResult<()> {
    m.add_function(wrap_pyfunction!(advantages, m)?)
}
