/// What a ledger refused something with.
pub fn text<T: std::fmt::Debug>(result: sao_core::Result<T>) -> String {
    match result {
        Err(sao_core::Error::Ledger(text)) => text,
        other => panic!("expected a ledger error, got {other:?}"),
    }
}
