//! How long to wait before trying again.

use std::time::Duration;

/// Exponential backoff with full jitter: before attempt n+1 wait a random time between nothing and
/// `base · 2^(n-1)`, at most `max`. Jitter over the whole span keeps a crowd that failed together
/// from coming back together.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Backoff {
    /// The span before the second attempt.
    pub base: Duration,
    /// No span is longer.
    pub max: Duration,
}

impl Backoff {
    /// A random wait after `failures` failures in a row (1 for the first).
    pub fn delay(&self, failures: u32) -> Duration {
        self.span(failures).mul_f64(fastrand::f64())
    }

    fn span(&self, failures: u32) -> Duration {
        // Saturating, so that no number of failures overflows the exponent.
        let factor = 2u32.saturating_pow(failures.saturating_sub(1));
        self.base.saturating_mul(factor).min(self.max)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const BACKOFF: Backoff = Backoff { base: Duration::from_secs(1), max: Duration::from_secs(300) };

    #[test]
    fn the_span_doubles_up_to_its_cap_and_never_overflows() {
        let spans = [1, 2, 3, 9, 10, 33, 64, u32::MAX].map(|n| BACKOFF.span(n).as_secs());
        assert_eq!(spans, [1, 2, 4, 256, 300, 300, 300, 300]);
    }

    #[test]
    fn the_wait_is_spread_over_the_whole_span() {
        let waits: Vec<_> = (0..1000).map(|_| BACKOFF.delay(4)).collect();
        assert!(waits.iter().all(|wait| *wait <= Duration::from_secs(8)));
        assert!(waits.iter().any(|wait| *wait < Duration::from_secs(2)));
        assert!(waits.iter().any(|wait| *wait > Duration::from_secs(6)));
    }
}
