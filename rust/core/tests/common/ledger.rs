use sao_core::ledger::{Event, Ledger, Phase};
use sao_core::Result;

/// The events of a task as calls.
#[allow(dead_code)] // not every test needs all
pub trait Calls {
    fn call(&mut self, event: Event) -> Result<bool>;

    fn issue(&mut self, ordinal: u64) -> Result<bool> {
        self.call(Event::Issue(ordinal))
    }
    fn generating(&mut self, ordinal: u64, attempt: u64) -> Result<bool> {
        self.call(Event::Generating(ordinal, attempt))
    }
    fn ready(&mut self, ordinal: u64, attempt: u64, tokens: u64) -> Result<bool> {
        self.call(Event::Ready(ordinal, attempt, tokens))
    }
    fn lease(&mut self, ordinals: &[u64], lease: u64) -> Result<bool> {
        self.call(Event::Lease(lease, ordinals.to_vec()))
    }
    fn give_back(&mut self, lease: u64) -> Result<bool> {
        self.call(Event::GiveBack(lease))
    }
    fn trained(&mut self, lease: u64, step: u64, trained: u64, masked: u64) -> Result<bool> {
        self.call(Event::Trained(lease, step, trained, masked))
    }
    fn drop_task(&mut self, task: u64, attempt: u64, why: &str, n: Option<u64>) -> Result<bool> {
        self.call(Event::Drop(task, attempt, why.into(), n))
    }
    fn requeue(&mut self, ordinal: u64, why: &str, tokens: Option<u64>) -> Result<bool> {
        self.call(Event::Requeue(ordinal, why.into(), tokens))
    }
    fn waste(&mut self, why: &str, tokens: u64) -> Result<bool> {
        self.call(Event::Waste(why.into(), tokens))
    }
}

impl Calls for Ledger {
    fn call(&mut self, event: Event) -> Result<bool> {
        self.record(&event)
    }
}

/// Issues a task and has it worked on; returns its attempt.
pub fn start(ledger: &mut Ledger, ordinal: u64) -> u64 {
    ledger.issue(ordinal).unwrap();
    let attempt = ledger.books().task(ordinal).unwrap().0;
    ledger.generating(ordinal, attempt).unwrap();
    attempt
}

/// Plays these tasks to the end and commits them as a step; a third of the tokens are masked.
#[allow(dead_code)]
pub fn train(ledger: &mut Ledger, step: u64, ordinals: &[u64]) {
    for ordinal in ordinals {
        let attempt = start(ledger, *ordinal);
        assert!(ledger.ready(*ordinal, attempt, 3 + ordinal).unwrap());
    }
    let lease = step % 3; // numbers of leases repeat, as they do when a broker is started again
    ledger.lease(ordinals, lease).unwrap();
    let total: u64 = ordinals.iter().map(|o| 3 + o).sum();
    ledger
        .trained(lease, step, total - total / 3, total / 3)
        .unwrap();
}

/// Where all unfinished tasks are.
#[allow(dead_code)]
pub fn unfinished(ledger: &Ledger) -> Vec<(u64, u64, Phase)> {
    ledger.books().unfinished().collect()
}

/// All that can be asked, as one comparable text.
pub fn facts(ledger: &Ledger) -> String {
    let books = ledger.books();
    books.check().unwrap();
    format!(
        "{:?} {:?} {:?} {:?} {} {:?} {:?}",
        books.counts().collect::<Vec<_>>(),
        books.tokens,
        books.unfinished().collect::<Vec<_>>(),
        books.leases,
        books.next_ordinal,
        books.last_step,
        books.note
    )
}

/// The error with which a ledger refused something.
pub fn text<T: std::fmt::Debug>(result: Result<T>) -> String {
    match result {
        Err(sao_core::Error::Ledger(text)) => text,
        other => panic!("expected a ledger error, got {other:?}"),
    }
}
