//! Generalised advantage estimation over ragged multi-segment trajectories.
//!
//! Steps are action tokens only: an observation, however long, lies between two steps and costs one `gamma * lambda`
//! (SAO, arXiv 2607.07508, Eq. 4-5). `V` at an action token is the value of the prefix before it. Credit crosses
//! context compactions as [`CrossSegment`] says (`CompactionRL`, arXiv 2607.05378, Eq. 13-15).

use multiversion::multiversion;

use crate::{Error, Result};

/// How credit crosses the cuts between the segments of one trajectory. What of it comes later: [`Batch::after`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CrossSegment {
    /// Every segment ends with the trajectory's reward and bootstrap; its advantages are then multiplied by
    /// `(gamma * lambda)^N`, `N` action tokens that were sampled later, in other segments (`CompactionRL` Eq. 13-14).
    Paper,
    /// The segments form chains, mostly one: the reward comes once, at the last action token of the chain, and the
    /// value of the first action token of the next segment follows the last of this one.
    Chained,
    /// As `Paper` without the factor.
    Independent,
}

/// The policy's lambda.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Lambda {
    /// The same for all trajectories.
    Fixed(f64),
    /// `1 - 1 / (alpha * l)` clamped to `[0, 1]`, `l` action tokens in all segments of the trajectory (SAO 4.1).
    Adaptive {
        /// alpha
        alpha: f64,
    },
}

impl Lambda {
    /// Lambda of a trajectory of `actions` action tokens; NaN if it has none.
    pub fn of(self, actions: usize) -> f64 {
        match self {
            _ if actions == 0 => f64::NAN,
            Self::Fixed(lambda) => lambda,
            Self::Adaptive { alpha } => (1.0 - 1.0 / (alpha * actions as f64)).clamp(0.0, 1.0),
        }
    }
}

/// The parameters of the estimators.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Parameters {
    /// Discount per action token, in `(0, 1]`.
    pub gamma: f64,
    /// Lambda of the policy's advantages.
    pub lambda_policy: Lambda,
    /// Lambda of the critic's targets, in `[0, 1]`.
    pub lambda_critic: f64,
    /// Credit across segments.
    pub cross_segment: CrossSegment,
    /// Off: every position from a segment's first to its last action token is a step (for ablations).
    pub skip_observations: bool,
}

/// A ragged batch: tokens of all segments of all trajectories, one after another.
#[derive(Clone, Copy, Debug)]
pub struct Batch<'a> {
    /// Critic values, one a token; read at steps only.
    pub values: &'a [f32],
    /// Not 0: sampled by the policy.
    pub action_mask: &'a [u8],
    /// Where each segment starts; ends with the number of tokens.
    pub segment_offsets: &'a [i64],
    /// First segment of each trajectory; ends with the number of segments.
    pub trajectory_offsets: &'a [i64],
    /// Reward of each trajectory.
    pub rewards: &'a [f32],
    /// Value after the last action token of each trajectory; none: 0.
    pub bootstrap: Option<&'a [f32]>,
    /// For each segment the action tokens that were sampled after its last one, and the segment that goes on behind it
    /// (-1: none); none: the action tokens of all later segments, and the next one.
    pub after: Option<(&'a [i64], &'a [i64])>,
    /// Tokens that earn a reward of their own, and those rewards; added to the trajectory's.
    pub turn_rewards: (&'a [i64], &'a [f32]),
}

/// Writes advantages and critic targets of the action tokens of `batch` and gives the policy lambda of each trajectory
/// (NaN: it has no action token and takes no part). Other tokens of the outputs become 0 if `clear`, and are left as they
/// are otherwise.
///
/// A turn reward belongs to the segment it was earned in and is discounted there like any reward; with
/// [`CrossSegment::Paper`] it therefore reaches earlier segments not at all and shares the factor of its own.
/// Accumulates in float64 by fused multiply-add, in the same order and to the same bit on every CPU.
///
/// # Errors
/// [`Error::Validation`] names the array, index and value that is wrong; the outputs are unspecified then.
pub fn advantages(
    batch: &Batch<'_>,
    parameters: &Parameters,
    clear: bool,
    advantages: &mut [f32],
    targets: &mut [f32],
) -> Result<Vec<f64>> {
    check(batch, parameters, advantages.len(), targets.len())?;
    let turns = sorted_turns(batch)?;
    let mut lambdas = vec![0.0; batch.rewards.len()];
    run(
        batch,
        parameters,
        &turns,
        clear,
        advantages,
        targets,
        &mut lambdas,
    )?;
    Ok(lambdas)
}

impl Batch<'_> {
    fn token_start(&self, trajectory: usize) -> usize {
        self.segment_offsets[self.trajectory_offsets[trajectory] as usize] as usize
    }
}

#[multiversion(targets(
    "x86_64+avx2+bmi1+bmi2+fma+lzcnt+popcnt+avx512f+avx512bw+avx512dq+avx512vl",
    "x86_64+avx2+bmi1+bmi2+fma+lzcnt+popcnt"
))]
fn run(
    batch: &Batch<'_>,
    parameters: &Parameters,
    turns: &[(usize, f64)],
    clear: bool,
    advantages: &mut [f32],
    targets: &mut [f32],
    lambdas: &mut [f64],
) -> Result<()> {
    for (trajectory, lambda) in lambdas.iter_mut().enumerate() {
        let tokens = batch.token_start(trajectory)..batch.token_start(trajectory + 1);
        let actions = count_actions(&batch.action_mask[tokens.clone()]);
        *lambda = parameters.lambda_policy.of(actions);
        let mut walk = Walk::new(
            batch,
            parameters,
            trajectory,
            *lambda,
            &mut advantages[tokens.clone()],
            &mut targets[tokens],
        );
        walk.clear = clear;
        if actions > 0 {
            walk.trajectory(turns)?;
        }
        walk.clear_down_to(0);
    }
    Ok(())
}

/// The backward recurrence over one trajectory.
struct Walk<'a> {
    batch: &'a Batch<'a>,
    trajectory: usize,
    start: usize,
    skip_observations: bool,
    cross_segment: CrossSegment,
    reward: f64,
    bootstrap: f64,
    gamma: f64,
    decay: f64,
    critic_decay: f64,
    advantages: &'a mut [f32],
    targets: &'a mut [f32],
    /// Whether tokens that are no actions become 0, and down to where the outputs are done.
    clear: bool,
    done: usize,
    /// Multiplies the advantages of the segment at hand.
    factor: f64,
    next_value: f64,
    carry: f64,
    critic_carry: f64,
}

impl<'a> Walk<'a> {
    fn new(
        batch: &'a Batch<'a>,
        parameters: &Parameters,
        trajectory: usize,
        lambda: f64,
        advantages: &'a mut [f32],
        targets: &'a mut [f32],
    ) -> Self {
        Self {
            batch,
            trajectory,
            start: batch.token_start(trajectory),
            skip_observations: parameters.skip_observations,
            cross_segment: parameters.cross_segment,
            reward: f64::from(batch.rewards[trajectory]),
            bootstrap: batch
                .bootstrap
                .map_or(0.0, |values| f64::from(values[trajectory])),
            gamma: parameters.gamma,
            decay: parameters.gamma * lambda,
            critic_decay: parameters.gamma * parameters.lambda_critic,
            clear: false,
            done: targets.len(),
            advantages,
            targets,
            factor: 1.0,
            next_value: 0.0,
            carry: 0.0,
            critic_carry: 0.0,
        }
    }

    #[allow(clippy::inline_always)]
    #[inline(always)]
    fn trajectory(&mut self, turns: &[(usize, f64)]) -> Result<()> {
        let segments = self.batch.trajectory_offsets[self.trajectory] as usize
            ..self.batch.trajectory_offsets[self.trajectory + 1] as usize;
        let mut later_actions = 0;
        let mut ended = false;
        let first = segments.start;
        // At the start of each segment of a trajectory that is not in order: what goes on there, if anything does.
        let mut starts = self.batch.after.map(|_| vec![None; segments.len()]);
        for segment in segments.rev() {
            if let (Some(starts), Some((later, next))) = (&mut starts, self.batch.after) {
                later_actions = later[segment] as usize;
                let behind: Option<[f64; 3]> = usize::try_from(next[segment])
                    .ok()
                    .and_then(|next| starts[next - first]);
                ended = behind.is_some();
                [self.next_value, self.carry, self.critic_carry] = behind.unwrap_or_default();
                starts[segment - first] = behind;
            }
            let from = self.batch.segment_offsets[segment] as usize;
            let to = self.batch.segment_offsets[segment + 1] as usize;
            let mask = &self.batch.action_mask[from..to];
            let Some(last) = last_action(mask) else {
                continue;
            };
            let mut reward = 0.0;
            if !ended || self.cross_segment != CrossSegment::Chained {
                reward = self.reward;
                self.next_value = self.bootstrap;
                self.carry = 0.0;
                self.critic_carry = 0.0;
                ended = true;
            }
            if self.cross_segment == CrossSegment::Paper {
                self.factor = self.decay.powf(later_actions as f64);
            }
            let first_turn = turns.partition_point(|&(token, _)| token < from);
            let last_turn = turns.partition_point(|&(token, _)| token < to);
            later_actions +=
                self.segment(from, from + last + 1, reward, &turns[first_turn..last_turn])?;
            if let Some(starts) = &mut starts {
                starts[segment - first] = Some([self.next_value, self.carry, self.critic_carry]);
            }
        }
        Ok(())
    }

    /// Tokens `[from, to)`, whose last is an action that earns `reward`; gives the number of action tokens.
    #[allow(clippy::inline_always)]
    #[inline(always)]
    fn segment(
        &mut self,
        from: usize,
        to: usize,
        mut reward: f64,
        mut turns: &[(usize, f64)],
    ) -> Result<usize> {
        let mask = self.batch.action_mask;
        let (mut stop, mut actions) = (to, 0);
        while stop > from {
            // [start, stop) is the longest run of action tokens that ends here.
            let start = from + last_observation(&mask[from..stop]).map_or(0, |at| at + 1);
            actions += stop - start;
            // A reward enters at the last token of a piece, so the inner loop has none.
            while stop > start {
                while let Some((&(token, extra), rest)) = turns.split_last() {
                    if token + 1 != stop {
                        break;
                    }
                    reward += extra;
                    turns = rest;
                }
                let piece = turns
                    .last()
                    .map_or(start, |&(token, _)| start.max(token + 1));
                self.piece(piece, stop, reward)?;
                (reward, stop) = (0.0, piece);
            }
            let Some(before) = last_action(&mask[from..start]) else {
                break;
            };
            let before = from + before + 1;
            if !self.skip_observations {
                self.observations(before, start)?;
            }
            stop = before;
        }
        Ok(actions)
    }

    /// Whatever is not finite among the values stays in the carries (0 * infinity is NaN), so they tell of it.
    fn finite(&self, from: usize, to: usize) -> Result<()> {
        if self.carry.is_finite() && self.critic_carry.is_finite() && self.next_value.is_finite() {
            return Ok(());
        }
        let values = &self.batch.values[from..to];
        let Some(at) = values.iter().position(|value| !value.is_finite()) else {
            return Ok(());
        };
        Err(Error::Validation(format!(
            "values[{}]: {} at a token of trajectory {} is not finite",
            from + at,
            values[at],
            self.trajectory
        )))
    }

    /// Nothing from here to what was written last is an action.
    fn clear_down_to(&mut self, to: usize) {
        if self.clear && to < self.done {
            self.advantages[to..self.done].fill(0.0);
            self.targets[to..self.done].fill(0.0);
        }
    }

    /// Action tokens `[from, to)`, not empty; `reward` is earned by the last.
    #[allow(clippy::inline_always)]
    #[inline(always)]
    fn piece(&mut self, from: usize, to: usize, reward: f64) -> Result<()> {
        let values = &self.batch.values[from..to];
        let range = from - self.start..to - self.start;
        self.clear_down_to(range.end);
        self.done = range.start;
        let (mut advantages, mut targets) = (
            &mut self.advantages[range.clone()],
            &mut self.targets[range],
        );
        let mut chain = Chain {
            gamma: self.gamma,
            decay: self.decay,
            critic_decay: self.critic_decay,
            factor: self.factor,
            next: self.next_value,
            carry: self.carry,
            critic: self.critic_carry,
        };
        // The reward joins what follows the last token; inside the chain there is none.
        let (blocks, odd) = (values.len() / BLOCK, values.len() % BLOCK);
        let (head, body) = values.split_at(odd);
        let mut reward = reward;
        for block in (0..blocks).rev() {
            let at = block * BLOCK;
            let (a, t);
            (advantages, a) = advantages.split_at_mut(odd + at);
            (targets, t) = targets.split_at_mut(odd + at);
            chain.block(&body[at..at + BLOCK], reward, a, t);
            reward = 0.0;
        }
        for at in (0..odd).rev() {
            let value = f64::from(head[at]);
            let delta = chain.gamma.mul_add(chain.next, -value) + reward;
            chain.carry = chain.decay.mul_add(chain.carry, delta);
            chain.critic = chain.critic_decay.mul_add(chain.critic, delta);
            advantages[at] = (chain.factor * chain.carry) as f32;
            targets[at] = (chain.critic + value) as f32;
            chain.next = value;
            reward = 0.0;
        }
        (self.next_value, self.carry, self.critic_carry) = (chain.next, chain.carry, chain.critic);
        self.finite(from, to)
    }

    /// Observation tokens `[from, to)` as steps of their own, for the ablation only; nothing is written.
    fn observations(&mut self, from: usize, to: usize) -> Result<()> {
        for &value in self.batch.values[from..to].iter().rev() {
            let value = f64::from(value);
            let delta = self.gamma.mul_add(self.next_value, -value);
            self.carry = self.decay.mul_add(self.carry, delta);
            self.critic_carry = self.critic_decay.mul_add(self.critic_carry, delta);
            self.next_value = value;
        }
        self.finite(from, to)
    }
}

/// Tokens that go through the recurrence together.
const BLOCK: usize = 8;

/// The recurrence in registers.
struct Chain {
    gamma: f64,
    decay: f64,
    critic_decay: f64,
    factor: f64,
    next: f64,
    carry: f64,
    critic: f64,
}

impl Chain {
    /// `BLOCK` tokens, `reward` at the last of them. Two tokens a link: `A_k = (d_k + c d_(k+1)) + c^2 A_(k+2)` makes the
    /// chain of dependent operations half as long, and everything else runs side by side.
    #[allow(clippy::inline_always)]
    #[inline(always)]
    fn block(&mut self, values: &[f32], reward: f64, advantages: &mut [f32], targets: &mut [f32]) {
        let mut value = [0.0f64; BLOCK];
        for (wide, &value) in value.iter_mut().zip(values) {
            *wide = f64::from(value);
        }
        let mut after = [self.next; BLOCK];
        after[..BLOCK - 1].copy_from_slice(&value[1..]);
        let mut delta = [0.0f64; BLOCK];
        for ((delta, &value), &after) in delta.iter_mut().zip(&value).zip(&after) {
            *delta = self.gamma.mul_add(after, -value);
        }
        delta[BLOCK - 1] += reward;
        let carries = link(&delta, self.decay, self.carry);
        let critics = link(&delta, self.critic_decay, self.critic);
        for (out, carry) in advantages.iter_mut().zip(carries) {
            *out = (self.factor * carry) as f32;
        }
        for ((out, critic), value) in targets.iter_mut().zip(critics).zip(value) {
            *out = (critic + value) as f32;
        }
        (self.next, self.carry, self.critic) = (value[0], carries[0], critics[0]);
    }
}

#[allow(clippy::inline_always)]
#[inline(always)]
fn link(delta: &[f64; BLOCK], decay: f64, mut carry: f64) -> [f64; BLOCK] {
    let square = decay * decay;
    let mut out = [0.0; BLOCK];
    for pair in (0..BLOCK / 2).rev() {
        let (first, second) = (delta[2 * pair], delta[2 * pair + 1]);
        out[2 * pair + 1] = decay.mul_add(carry, second);
        carry = square.mul_add(carry, decay.mul_add(second, first));
        out[2 * pair] = carry;
    }
    out
}

/// Position of the last action token; whole blocks of observations are skipped without looking at each.
#[allow(clippy::inline_always)]
#[inline(always)]
fn last_action(mask: &[u8]) -> Option<usize> {
    let mut end = mask.len();
    while let Some(block) = end.checked_sub(32).map(|from| &mask[from..end]) {
        if block.iter().fold(0, |all, &action| all | action) != 0 {
            break;
        }
        end -= 32;
    }
    mask[..end].iter().rposition(|&action| action != 0)
}

/// Position of the last observation token.
#[allow(clippy::inline_always)]
#[inline(always)]
fn last_observation(mask: &[u8]) -> Option<usize> {
    let mut end = mask.len();
    while let Some(block) = end.checked_sub(32).map(|from| &mask[from..end]) {
        if block
            .iter()
            .fold(0, |any, &action| any | u8::from(action == 0))
            != 0
        {
            break;
        }
        end -= 32;
    }
    mask[..end].iter().rposition(|&action| action == 0)
}

fn count_actions(mask: &[u8]) -> usize {
    // In blocks whose count fits a byte, so that the compiler sums bytes side by side.
    mask.chunks(255)
        .map(|block| {
            usize::from(
                block
                    .iter()
                    .map(|&action| u8::from(action != 0))
                    .sum::<u8>(),
            )
        })
        .sum()
}

fn sorted_turns(batch: &Batch<'_>) -> Result<Vec<(usize, f64)>> {
    let (positions, rewards) = batch.turn_rewards;
    if positions.len() != rewards.len() {
        return fail(format!(
            "turn_rewards: {} positions but {} rewards",
            positions.len(),
            rewards.len()
        ));
    }
    let mut turns = Vec::with_capacity(positions.len());
    for (index, (&position, &reward)) in positions.iter().zip(rewards).enumerate() {
        let token = usize::try_from(position).unwrap_or(usize::MAX);
        if batch
            .action_mask
            .get(token)
            .is_none_or(|&action| action == 0)
        {
            return fail(format!(
                "turn_rewards[{index}]: position {position} is not an action token"
            ));
        }
        if !reward.is_finite() {
            return fail(format!("turn_rewards[{index}]: {reward} is not finite"));
        }
        turns.push((token, f64::from(reward)));
    }
    turns.sort_by_key(|&(token, _)| token);
    Ok(turns)
}

fn fail<T>(text: String) -> Result<T> {
    Err(Error::Validation(text))
}

fn check(
    batch: &Batch<'_>,
    parameters: &Parameters,
    advantages: usize,
    targets: usize,
) -> Result<()> {
    let tokens = batch.values.len();
    for (name, len) in [
        ("action_mask", batch.action_mask.len()),
        ("advantages", advantages),
        ("targets", targets),
    ] {
        if len != tokens {
            return fail(format!("{name}: {len} entries, but values has {tokens}"));
        }
    }
    check_offsets("segment_offsets", batch.segment_offsets, tokens)?;
    check_offsets(
        "trajectory_offsets",
        batch.trajectory_offsets,
        batch.segment_offsets.len() - 1,
    )?;
    check_after(batch)?;
    let count = batch.trajectory_offsets.len() - 1;
    check_finite("rewards", batch.rewards, count)?;
    if let Some(bootstrap) = batch.bootstrap {
        check_finite("bootstrap", bootstrap, count)?;
    }
    let Parameters {
        gamma,
        lambda_policy,
        lambda_critic,
        ..
    } = *parameters;
    if !(gamma > 0.0 && gamma <= 1.0) {
        return fail(format!("gamma: {gamma} is not in (0, 1]"));
    }
    if !(0.0..=1.0).contains(&lambda_critic) {
        return fail(format!("lambda_critic: {lambda_critic} is not in [0, 1]"));
    }
    match lambda_policy {
        Lambda::Fixed(lambda) if !(0.0..=1.0).contains(&lambda) => {
            fail(format!("lambda_policy: {lambda} is not in [0, 1]"))
        }
        Lambda::Adaptive { alpha } if !(alpha.is_finite() && alpha > 0.0) => {
            fail(format!("lambda_alpha: {alpha} is not a positive number"))
        }
        _ => Ok(()),
    }
}

fn check_after(batch: &Batch<'_>) -> Result<()> {
    let Some((later, next)) = batch.after else {
        return Ok(());
    };
    let segments = batch.segment_offsets.len() - 1;
    for (name, len) in [("after[0]", later.len()), ("after[1]", next.len())] {
        if len != segments {
            return fail(format!("{name}: {len} entries for {segments} segments"));
        }
    }
    if let Some(at) = later.iter().position(|&later| later < 0) {
        return fail(format!("after[0][{at}]: {} is negative", later[at]));
    }
    for ends in batch.trajectory_offsets.windows(2) {
        for at in ends[0]..ends[1] {
            let next = next[at as usize];
            if next != -1 && !(at + 1..ends[1]).contains(&next) {
                return fail(format!(
                    "after[1][{at}]: {next} is neither -1 nor a later segment of the trajectory, which ends at {}",
                    ends[1]
                ));
            }
        }
    }
    Ok(())
}

fn check_offsets(name: &str, offsets: &[i64], end: usize) -> Result<()> {
    let (Some(first), Some(last)) = (offsets.first(), offsets.last()) else {
        return fail(format!(
            "{name}: must start with 0 and end with {end}, is empty"
        ));
    };
    if *first != 0 || *last != end as i64 {
        return fail(format!(
            "{name}: must start with 0 and end with {end}, got {first} and {last}"
        ));
    }
    match offsets.windows(2).position(|pair| pair[0] > pair[1]) {
        Some(at) => fail(format!(
            "{name}[{}]: {} is below its predecessor {}",
            at + 1,
            offsets[at + 1],
            offsets[at]
        )),
        None => Ok(()),
    }
}

fn check_finite(name: &str, values: &[f32], count: usize) -> Result<()> {
    if values.len() != count {
        return fail(format!(
            "{name}: {} entries for {count} trajectories",
            values.len()
        ));
    }
    match values.iter().position(|value| !value.is_finite()) {
        Some(at) => fail(format!("{name}[{at}]: {} is not finite", values[at])),
        None => Ok(()),
    }
}
