use sao_core::ledger::Ledger;

/// All that can be asked, as one comparable text.
pub fn facts(ledger: &Ledger) -> String {
    ledger.check().unwrap();
    format!(
        "{:?} {:?} {:?} {:?} {} {:?}",
        ledger.counts(),
        ledger.tokens(),
        ledger.unfinished(),
        ledger.leases(),
        ledger.next_ordinal(),
        ledger.last_step()
    )
}
