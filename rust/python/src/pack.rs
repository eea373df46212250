//! Bindings of `sao_core::{pack, plan}`.

use numpy::{IntoPyArray, PyArray1, PyArray2, PyArrayMethods};
use pyo3::prelude::*;
use sao_core::{pack, plan};

use crate::argument::{array, count};
use crate::call::run;

/// Above this many segments the GIL is released.
const DETACH_SEGMENTS: usize = 1000;

type Bins<'py> = (Bound<'py, PyArray1<i64>>, Bound<'py, PyArray1<i64>>);

#[pyfunction(name = "pack")]
fn pack_bins<'py>(lengths: &Bound<'py, PyAny>, capacity: i64) -> PyResult<Bins<'py>> {
    let py = lengths.py();
    let lengths = array::<i64>("lengths", lengths)?;
    let lengths = lengths.as_slice()?;
    let bins = run(py, lengths.len() > DETACH_SEGMENTS, || {
        pack::pack(lengths, capacity)
    })?;
    Ok((bins.order.into_pyarray(py), bins.offsets.into_pyarray(py)))
}

/// Where every segment of a learner step goes.
#[pyclass(frozen, module = "sao._core")]
struct Plan {
    #[pyo3(get)]
    rank: Py<PyArray1<i32>>,
    #[pyo3(get)]
    micro_batch: Py<PyArray1<i32>>,
    #[pyo3(get)]
    row: Py<PyArray1<i32>>,
    #[pyo3(get)]
    position: Py<PyArray1<i32>>,
    #[pyo3(get)]
    costs: Py<PyArray2<f64>>,
    #[pyo3(get)]
    n_micro_batches: usize,
    #[pyo3(get)]
    hash: u64,
}

#[pymethods]
impl Plan {
    fn __repr__(&self) -> String {
        format!(
            "Plan(n_micro_batches={}, hash={:#018x})",
            self.n_micro_batches, self.hash
        )
    }
}

#[pyfunction(name = "plan")]
#[pyo3(signature = (lengths, ranks, row_tokens, rows_per_micro_batch, *, linear_cost=24576.0, quadratic_cost=1.0))]
fn plan_step(
    lengths: &Bound<'_, PyAny>,
    ranks: i64,
    row_tokens: i64,
    rows_per_micro_batch: i64,
    linear_cost: f64,
    quadratic_cost: f64,
) -> PyResult<Plan> {
    let py = lengths.py();
    let lengths = array::<i64>("lengths", lengths)?;
    let lengths = lengths.as_slice()?;
    let layout = plan::Layout {
        ranks: count("ranks", ranks, 1)?,
        row_tokens,
        rows_per_micro_batch: count("rows_per_micro_batch", rows_per_micro_batch, 1)?,
        linear_cost,
        quadratic_cost,
    };
    let plan = run(py, lengths.len() > DETACH_SEGMENTS, || {
        plan::plan(lengths, &layout)
    })?;
    let costs = plan
        .costs
        .into_pyarray(py)
        .reshape([layout.ranks, plan.n_micro_batches])?;
    Ok(Plan {
        rank: plan.rank.into_pyarray(py).unbind(),
        micro_batch: plan.micro_batch.into_pyarray(py).unbind(),
        row: plan.row.into_pyarray(py).unbind(),
        position: plan.position.into_pyarray(py).unbind(),
        costs: costs.unbind(),
        n_micro_batches: plan.n_micro_batches,
        hash: plan.hash,
    })
}

/// Adds this topic to the module.
pub fn register(m: &Bound<'_, PyModule>) -> PyResult<()> {
    m.add_class::<Plan>()?;
    m.add_function(wrap_pyfunction!(pack_bins, m)?)?;
    m.add_function(wrap_pyfunction!(plan_step, m)?)
}
