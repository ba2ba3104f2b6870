//! A TCP proxy between a service and a server, to do to their connections what networks do.
//!
//! The proxies that Rust has (noxious, tokio-netem) slow connections down and break them, but cannot
//! keep one open while nothing passes, which is the fault that hurts most: nobody is told.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use anyhow::Context;
use reqwest::Url;
use tokio::io::{self, AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio::time::sleep;

/// Passes connections on to a server. It listens on a free port of 127.0.0.1, and is gone with all
/// of its connections when this is dropped.
pub struct Proxy {
    address: SocketAddr,
    /// Connections made until now; each has the number of those before it.
    made: Arc<AtomicU64>,
    weather: watch::Sender<Weather>,
}

#[derive(Debug, Clone, Copy, Default)]
struct Weather {
    refuses: bool,
    holds: bool,
    delay: Duration,
    /// Connections with a lower number are cut.
    cut_below: u64,
    /// Connections with a lower number are lost: open, and nothing ever passes again.
    lost_below: u64,
}

impl Proxy {
    /// A proxy of the server that listens, now or later, on this port of 127.0.0.1.
    pub async fn start(server_port: u16) -> io::Result<Self> {
        let listener = TcpListener::bind("127.0.0.1:0").await?;
        let address = listener.local_addr()?;
        let (weather, forecast) = watch::channel(Weather::default());
        let made = Arc::default();
        tokio::spawn(accept(listener, ([127, 0, 0, 1], server_port).into(), Arc::clone(&made), forecast));
        Ok(Self { address, made, weather })
    }

    /// A proxy of the server at this URL on 127.0.0.1, and the URL through the proxy.
    pub async fn of(url: &str) -> anyhow::Result<(String, Self)> {
        let mut url: Url = url.parse()?;
        let proxy = Self::start(url.port().context("the URL names a port")?).await?;
        url.set_port(Some(proxy.port())).ok().context("the URL can have a port")?;
        Ok((url.into(), proxy))
    }

    /// The port to connect to in the server's place.
    pub fn port(&self) -> u16 {
        self.address.port()
    }

    /// Resets every connection that there is.
    pub fn cut(&self) {
        let made = self.made.load(Ordering::SeqCst);
        self.weather.send_modify(|weather| weather.cut_below = made);
    }

    /// Makes every connection that there is useless, without a word to either side. New ones work.
    pub fn lose(&self) {
        let made = self.made.load(Ordering::SeqCst);
        self.weather.send_modify(|weather| weather.lost_below = made);
    }

    /// Resets new connections at once, or no longer.
    pub fn refuse(&self, refuses: bool) {
        self.weather.send_modify(|weather| weather.refuses = refuses);
    }

    /// Keeps everything that is sent, or passes it on from now.
    pub fn hold(&self, holds: bool) {
        self.weather.send_modify(|weather| weather.holds = holds);
    }

    /// Lets whatever is sent take this much longer, in each direction.
    pub fn delay(&self, delay: Duration) {
        self.weather.send_modify(|weather| weather.delay = delay);
    }
}

async fn accept(listener: TcpListener, server: SocketAddr, made: Arc<AtomicU64>, weather: watch::Receiver<Weather>) {
    loop {
        let accepted = tokio::select! {
            accepted = listener.accept() => accepted,
            () = gone(weather.clone()) => return,
        };
        let Ok((client, _)) = accepted else { continue };
        if weather.borrow().refuses {
            // Nothing can be done about it if even this fails.
            let _ = client.set_zero_linger();
            continue;
        }
        let number = made.fetch_add(1, Ordering::SeqCst);
        tokio::spawn(connect(client, server, number, weather.clone()));
    }
}

/// Returns when the proxy was dropped.
async fn gone(mut weather: watch::Receiver<Weather>) {
    while weather.changed().await.is_ok() {}
}

/// Passes everything on between a client and the server until either closes the connection.
async fn connect(mut client: TcpStream, server: SocketAddr, number: u64, weather: watch::Receiver<Weather>) {
    let Ok(mut server) = TcpStream::connect(server).await else {
        // The server is away, and so is the connection.
        let _ = client.set_zero_linger();
        return;
    };
    let mut to_be_cut = weather.clone();
    let is_cut = {
        let (from_client, to_client) = client.split();
        let (from_server, to_server) = server.split();
        tokio::select! {
            _ = pass_on(from_client, to_server, number, weather.clone()) => false,
            _ = pass_on(from_server, to_client, number, weather) => false,
            // An error says that the proxy is gone.
            _ = to_be_cut.wait_for(|weather| number < weather.cut_below) => true,
        }
    };
    if is_cut {
        let _ = (client.set_zero_linger(), server.set_zero_linger());
    }
}

async fn pass_on(
    mut from: impl AsyncRead + Unpin,
    mut to: impl AsyncWrite + Unpin,
    number: u64,
    mut weather: watch::Receiver<Weather>,
) -> io::Result<()> {
    let mut bytes = vec![0; 16 * 1024];
    loop {
        let length = from.read(&mut bytes).await?;
        let delay = weather.borrow().delay;
        sleep(delay).await;
        let passes = |weather: &Weather| !weather.holds && number >= weather.lost_below;
        if weather.wait_for(passes).await.is_err() || length == 0 {
            return Ok(());
        }
        to.write_all(&bytes[..length]).await?;
    }
}

#[cfg(test)]
mod tests {
    use std::io::ErrorKind;

    use tokio::time::{Instant, timeout};

    use super::*;

    const A_WHILE: Duration = Duration::from_millis(200);

    /// A server that says what it is told.
    async fn echo() -> u16 {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let port = listener.local_addr().unwrap().port();
        tokio::spawn(async move {
            while let Ok((mut client, _)) = listener.accept().await {
                tokio::spawn(async move {
                    let (mut from, mut to) = client.split();
                    io::copy(&mut from, &mut to).await
                });
            }
        });
        port
    }

    async fn client(proxy: &Proxy) -> TcpStream {
        TcpStream::connect(("127.0.0.1", proxy.port())).await.unwrap()
    }

    async fn ask(client: &mut TcpStream) -> io::Result<()> {
        client.write_all(b"hello").await?;
        let mut answer = [0; 5];
        client.read_exact(&mut answer).await?;
        assert_eq!(&answer, b"hello");
        Ok(())
    }

    #[tokio::test]
    async fn what_is_sent_arrives_and_after_a_cut_a_new_connection_works() {
        let proxy = Proxy::start(echo().await).await.unwrap();
        let mut before = client(&proxy).await;
        ask(&mut before).await.unwrap();
        proxy.cut();
        assert_eq!(before.read_u8().await.unwrap_err().kind(), ErrorKind::ConnectionReset);
        ask(&mut client(&proxy).await).await.unwrap();
    }

    #[tokio::test]
    async fn while_it_refuses_only_old_connections_work() {
        let proxy = Proxy::start(echo().await).await.unwrap();
        let mut before = client(&proxy).await;
        ask(&mut before).await.unwrap();
        proxy.refuse(true);
        assert!(ask(&mut client(&proxy).await).await.is_err());
        ask(&mut before).await.unwrap();
        proxy.refuse(false);
        ask(&mut client(&proxy).await).await.unwrap();
    }

    #[tokio::test]
    async fn what_is_held_arrives_when_it_is_released() {
        let proxy = Proxy::start(echo().await).await.unwrap();
        let mut client = client(&proxy).await;
        proxy.hold(true);
        client.write_all(b"!").await.unwrap();
        assert!(timeout(A_WHILE, client.read_u8()).await.is_err());
        proxy.hold(false);
        assert_eq!(client.read_u8().await.unwrap(), b'!');
    }

    #[tokio::test]
    async fn a_lost_connection_stays_open_and_silent_beside_a_new_one() {
        let proxy = Proxy::start(echo().await).await.unwrap();
        let mut lost = client(&proxy).await;
        ask(&mut lost).await.unwrap();
        proxy.lose();
        assert!(timeout(A_WHILE, ask(&mut lost)).await.is_err());
        ask(&mut client(&proxy).await).await.unwrap();
    }

    #[tokio::test]
    async fn a_delay_holds_up_both_directions() {
        let proxy = Proxy::start(echo().await).await.unwrap();
        let mut client = client(&proxy).await;
        proxy.delay(A_WHILE);
        let begun = Instant::now();
        ask(&mut client).await.unwrap();
        assert!(begun.elapsed() >= 2 * A_WHILE);
    }

    #[tokio::test]
    async fn when_it_is_dropped_its_connections_and_its_port_are_gone() {
        let proxy = Proxy::start(echo().await).await.unwrap();
        let (mut client, port) = (client(&proxy).await, proxy.port());
        ask(&mut client).await.unwrap();
        drop(proxy);
        assert!(client.read_u8().await.is_err());
        while TcpStream::connect(("127.0.0.1", port)).await.is_ok() {
            tokio::task::yield_now().await;
        }
    }
}
