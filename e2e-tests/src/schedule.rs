//! All that a nemesis run does, drawn from its seed before it begins: the same seed, the same faults
//! at the same times, the same orders.

use std::fmt::{self, Display, Formatter};
use std::ops::Range;
use std::time::Duration;

use fastrand::Rng;
use uuid::Uuid;

/// Which program each process runs: two of each, so that one can go on where the other stops. The
/// relays of the first two are embedded, the last two are the relays of the middle two.
pub(crate) const PROCESSES: [&str; 6] =
    ["order-service", "order-service", "payment-service", "payment-service", "outbox-relay", "outbox-relay"];

/// Processes, as places in [`PROCESSES`].
pub(crate) type Victims = Vec<usize>;

/// All that happens to the services in one run.
#[derive(Debug, Clone, PartialEq)]
pub struct Schedule {
    pub(crate) seed: u64,
    pub(crate) length: Duration,
    /// What every process is told: waits so short that faults outlast them.
    pub(crate) settings: Vec<(&'static str, String)>,
    pub(crate) orders: Vec<OrderPlan>,
    /// Lanes run side by side; the faults of one lane follow each other.
    pub(crate) lanes: Vec<Vec<FaultPlan>>,
}

/// An order that a client places.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct OrderPlan {
    pub(crate) at: Duration,
    pub(crate) key: Uuid,
    pub(crate) customer: Uuid,
    /// It also decides how the gateway behaves.
    pub(crate) amount: i64,
    /// Which instance is asked first.
    pub(crate) instance: usize,
    /// Another instance is asked for the same at the same time.
    pub(crate) is_asked_twice: bool,
    /// How long after the answer it is cancelled.
    pub(crate) cancelled_after: Option<Duration>,
}

/// A fault, when it begins, and how long it lasts.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct FaultPlan {
    pub(crate) at: Duration,
    pub(crate) lasts: Duration,
    pub(crate) fault: Fault,
}

#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Fault {
    /// `kill -9`; it starts again at the end.
    Kill(Victims),
    /// SIGTERM; it starts again at the end.
    Stop(Victims),
    /// SIGSTOP, and SIGCONT at the end.
    Freeze(Victims),
    Server(Server, Outage),
    /// What happens to the connections of some processes to a server.
    Network(Server, Trouble, Victims),
    /// The payment gateway lets everybody wait.
    Gateway,
}

#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum Server {
    Postgres,
    Nats,
}

#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum Outage {
    /// It stops in good order; it starts again at the end.
    Stop,
    /// It stops as in a power cut; it starts again at the end.
    Crash,
    Freeze,
}

#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum Trouble {
    /// All connections are reset.
    Cut,
    /// Nothing ever passes again through the connections that there are.
    Lose,
    /// New connections are reset.
    Refuse,
    /// Nothing passes, until the end.
    Hold,
    /// Everything takes longer.
    Delay(Duration),
}

/// Orders placed per second, on average.
const ORDERS_PER_SECOND: u64 = 10;

/// A connection that is lost in silence is missed after some time only: too late for a shorter run.
const LONG: Duration = Duration::from_secs(60);

impl Schedule {
    /// The schedule of this seed for a run of this length.
    pub fn draw(seed: u64, length: Duration) -> Self {
        let mut rng = Rng::with_seed(seed);
        let settings = settings(&mut rng);
        let orders = orders(&mut rng, length);
        let often = 500..4_000;
        let rarely = 2_000..8_000;
        let may_lose = length >= LONG;
        let lanes = vec![
            lane(&mut rng, length, &often, |rng| of_a_program(rng, 0)),
            lane(&mut rng, length, &often, |rng| of_a_program(rng, 2)),
            lane(&mut rng, length, &often, |rng| of_a_program(rng, 4)),
            lane(&mut rng, length, &rarely, |rng| of_a_server(rng, Server::Postgres)),
            lane(&mut rng, length, &rarely, |rng| of_a_server(rng, Server::Nats)),
            lane(&mut rng, length, &often, |rng| of_the_network(rng, Server::Postgres, may_lose)),
            lane(&mut rng, length, &often, |rng| of_the_network(rng, Server::Nats, may_lose)),
            lane(&mut rng, length, &rarely, |rng| (Fault::Gateway, millis(rng, 500..3_000))),
        ];
        Self { seed, length, settings, orders, lanes }
    }
}

fn settings(rng: &mut Rng) -> Vec<(&'static str, String)> {
    let lease = format!("{}ms", rng.u64(1_000..2_000));
    let ack_wait = format!("{}ms", rng.u64(1_500..3_000));
    // Short ones let second publications into the stream, so that the inbox has to know them.
    let window = pick(rng, &["100ms", "1s", "2m"]).to_owned();
    let relay_batch = pick(rng, &["5", "50", "500"]).to_owned();
    let consumer_batch = pick(rng, &["20", "50", "256"]).to_owned();
    let fixed = [
        ("RELAY_PUBLISH_TIMEOUT", "500ms"),
        ("RELAY_BACKOFF_BASE", "100ms"),
        ("RELAY_BACKOFF_MAX", "2s"),
        ("CONSUMER_BACKOFF_BASE", "100ms"),
        ("CONSUMER_BACKOFF_MAX", "2s"),
        ("GATEWAY_TIMEOUT", "1s"),
        ("SHUTDOWN_GRACE", "3s"),
    ];
    let mut settings = vec![
        ("RELAY_LEASE", lease),
        ("CONSUMER_ACK_WAIT", ack_wait),
        ("STREAM_DUPLICATE_WINDOW", window),
        ("RELAY_BATCH", relay_batch),
        ("CONSUMER_BATCH", consumer_batch),
    ];
    settings.extend(fixed.map(|(variable, value)| (variable, value.to_owned())));
    settings
}

fn orders(rng: &mut Rng, length: Duration) -> Vec<OrderPlan> {
    let count = length.as_millis() as u64 * ORDERS_PER_SECOND / 1_000;
    let mut orders: Vec<OrderPlan> = (0..count).map(|_| order(rng, length)).collect();
    orders.sort_by_key(|order| order.at);
    orders
}

fn order(rng: &mut Rng, length: Duration) -> OrderPlan {
    let amount = rng.i64(1..100_000);
    OrderPlan {
        at: length.mul_f64(rng.f64()),
        key: Uuid::from_u128(rng.u128(..)),
        customer: Uuid::from_u128(rng.u128(..)),
        // The gateway declines what ends in 13.
        amount: if one_in(rng, 8) { amount / 100 * 100 + 13 } else { amount },
        instance: rng.usize(0..2),
        is_asked_twice: one_in(rng, 6),
        // Before, while and after it is paid.
        cancelled_after: one_in(rng, 3).then(|| millis(rng, 0..2_000)),
    }
}

/// Draws faults, one after the other, until the time is over.
fn lane(
    rng: &mut Rng,
    length: Duration,
    pause: &Range<u64>,
    draw: impl Fn(&mut Rng) -> (Fault, Duration),
) -> Vec<FaultPlan> {
    let mut faults = Vec::new();
    let mut at = Duration::ZERO;
    loop {
        at += millis(rng, pause.clone());
        if at > length {
            return faults;
        }
        let (fault, lasts) = draw(rng);
        if at + lasts <= length {
            faults.push(FaultPlan { at, lasts, fault });
            at += lasts;
        }
    }
}

/// A fault of one or both instances of the program whose first place this is.
fn of_a_program(rng: &mut Rng, first: usize) -> (Fault, Duration) {
    let victims = if one_in(rng, 4) { vec![first, first + 1] } else { vec![first + rng.usize(0..2)] };
    match rng.u32(0..10) {
        0..5 => (Fault::Kill(victims), millis(rng, 0..2_000)),
        5 => (Fault::Stop(victims), millis(rng, 0..2_000)),
        // Most of them longer than any lease.
        _ => (Fault::Freeze(victims), millis(rng, 500..5_000)),
    }
}

fn of_a_server(rng: &mut Rng, server: Server) -> (Fault, Duration) {
    let outage = pick(rng, &[Outage::Stop, Outage::Crash, Outage::Freeze]);
    (Fault::Server(server, outage), millis(rng, 0..3_000))
}

fn of_the_network(rng: &mut Rng, server: Server, may_lose: bool) -> (Fault, Duration) {
    let all = 0..PROCESSES.len();
    let victims = if one_in(rng, 3) { all.collect() } else { vec![rng.usize(all)] };
    let (trouble, lasts) = match rng.u32(0..5) {
        0 => (Trouble::Cut, Duration::ZERO),
        1 if may_lose => (Trouble::Lose, Duration::ZERO),
        2 => (Trouble::Refuse, millis(rng, 500..3_000)),
        3 => (Trouble::Hold, millis(rng, 500..5_000)),
        _ => (Trouble::Delay(millis(rng, 10..300)), millis(rng, 1_000..4_000)),
    };
    (Fault::Network(server, trouble, victims), lasts)
}

fn millis(rng: &mut Rng, range: Range<u64>) -> Duration {
    Duration::from_millis(rng.u64(range))
}

fn one_in(rng: &mut Rng, many: u32) -> bool {
    rng.u32(0..many) == 0
}

fn pick<T: Copy>(rng: &mut Rng, from: &[T]) -> T {
    from[rng.usize(0..from.len())]
}

impl Fault {
    /// What it is called where faults are counted.
    pub(crate) fn kind(&self) -> String {
        match self {
            Self::Kill(_) => "kill -9".to_owned(),
            Self::Stop(_) => "SIGTERM".to_owned(),
            Self::Freeze(_) => "freeze".to_owned(),
            Self::Server(server, outage) => format!("{server} {outage}"),
            Self::Network(server, trouble, _) => format!("connections to {server} {trouble}"),
            Self::Gateway => "gateway hangs".to_owned(),
        }
    }

    fn victims(&self) -> &[usize] {
        match self {
            Self::Kill(victims) | Self::Stop(victims) | Self::Freeze(victims) | Self::Network(_, _, victims) => victims,
            Self::Server(..) | Self::Gateway => &[],
        }
    }
}

impl Display for Server {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Postgres => "PostgreSQL",
            Self::Nats => "NATS",
        })
    }
}

impl Display for Outage {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Stop => "restart",
            Self::Crash => "crash",
            Self::Freeze => "freeze",
        })
    }
}

impl Display for Trouble {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Cut => "cut",
            Self::Lose => "lost",
            Self::Refuse => "refused",
            Self::Hold => "held",
            Self::Delay(_) => "delayed",
        })
    }
}

impl Display for FaultPlan {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        write!(f, "{} for {} ms", self.fault.kind(), self.lasts.as_millis())?;
        for victim in self.fault.victims() {
            write!(f, ", {} {}", PROCESSES[*victim], victim % 2 + 1)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    const MINUTE: Duration = Duration::from_secs(60);

    #[test]
    fn a_seed_stands_for_one_schedule() {
        assert_eq!(Schedule::draw(7, MINUTE), Schedule::draw(7, MINUTE));
        assert_ne!(Schedule::draw(7, MINUTE).lanes, Schedule::draw(8, MINUTE).lanes);
    }

    #[test]
    fn the_faults_of_a_lane_follow_each_other_and_end_in_time() {
        for lane in Schedule::draw(7, 10 * MINUTE).lanes {
            assert!(lane.windows(2).all(|pair| pair[0].at + pair[0].lasts <= pair[1].at));
            assert!(lane.iter().all(|fault| fault.at + fault.lasts <= 10 * MINUTE));
        }
    }

    #[test]
    fn ten_minutes_bring_every_kind_of_fault() {
        let schedule = Schedule::draw(7, 10 * MINUTE);
        let kinds: BTreeSet<String> = schedule.lanes.iter().flatten().map(|plan| plan.fault.kind()).collect();
        assert_eq!(kinds.len(), 3 + 2 * 3 + 2 * 5 + 1, "{kinds:?}");
    }
}
