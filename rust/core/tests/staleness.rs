//! Lags, admission and the clock.

use std::time::Duration;

use proptest::prelude::*;
use sao_core::staleness::{token_lags, Admission, VersionClock};
use sao_core::wait::Stop;
use sao_core::Error;

proptest! {
    #[test]
    fn lags_are_those_of_the_dense_versions(
        runs in prop::collection::vec((1usize..9, 0i64..3, 0usize..4), 0..9),
        bits in prop::collection::vec(any::<bool>(), 200),
        ahead in 0i64..4,
    ) {
        let (mut spans, mut dense, mut version) = (Vec::new(), Vec::new(), 0);
        for (len, more, gap) in runs {
            dense.extend(std::iter::repeat_n(None, gap));
            version += more;
            spans.push([dense.len() as i64, (dense.len() + len) as i64, version]);
            dense.extend(std::iter::repeat_n(Some(version), len));
        }
        let mask: Vec<u8> = dense.iter().zip(bits).map(|(version, bit)| u8::from(version.is_some() && bit)).collect();
        let learner = version + ahead;
        let lags = token_lags(&mask, &spans, learner).expect("valid");
        for ((&lag, &action), version) in lags.iter().zip(&mask).zip(&dense) {
            let wanted = if action == 0 { -1 } else { (learner - version.expect("covered")) as i32 };
            prop_assert_eq!(lag, wanted);
        }
        // One sampled token outside of the spans is found.
        if let Some(at) = dense.iter().position(Option::is_none) {
            let mut mask = mask;
            mask[at] = 1;
            let named = format!("action_mask[{at}]");
            prop_assert!(token_lags(&mask, &spans, learner).is_err_and(|error| error.to_string().starts_with(&named)));
        }
    }

    #[test]
    fn permits_never_overflow(values in prop::array::uniform7(any::<u64>())) {
        let [max_lag, batch, steps, trained, leased, ready, running] = values;
        let permits = Admission { max_lag, batch }.permits(steps, trained, leased, ready, running);
        // A permit more than there are would need more room than there is.
        let held = [trained, leased, ready, running].map(u128::from).iter().sum::<u128>();
        let rows = u128::from(max_lag) + u128::from(steps) + 1;
        prop_assert!(permits == 0 || (held + u128::from(permits) - 1) / u128::from(batch) < rows);
        prop_assert!(permits == u64::MAX || batch == 0 || (held + u128::from(permits)) / u128::from(batch) >= rows);
    }
}

#[test]
fn an_advance_while_the_caller_is_asked_is_not_missed() {
    let clock = VersionClock::new(0).expect("valid");
    let mut asked = 0;
    let version = clock.wait(5, &mut || {
        asked += 1;
        assert_eq!(asked, 1, "the version was there already");
        clock.advance(5).expect("forward");
        Ok(Duration::from_secs(3600))
    });
    assert_eq!(version, Ok(5));
}

#[test]
fn a_wait_ends_as_its_caller_says() {
    let clock = VersionClock::new(0).expect("valid");
    let waited = |stop: Stop| clock.wait(1, &mut move || Err(stop));
    assert_eq!(
        waited(Stop::Deadline { waited_s: 2.5 }),
        Err(Error::Deadline("waited 2.5 s for policy version 1".into()))
    );
    assert!(matches!(
        waited(Stop::Interrupted),
        Err(Error::Interrupted(_))
    ));
}
