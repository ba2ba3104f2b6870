//! The guarantees, each tested on real servers.

mod consumer;
mod crash;
mod dev;
mod fixture;
mod gateway;
mod http;
mod http_bodies;
mod http_idempotency;
mod http_orders;
mod http_outages;
mod http_payments;
mod metrics;
mod nemesis;
mod network;
mod outbox;
mod process;
mod promise;
mod readme;
mod relay;
mod servers;
mod startup;
mod tracing;
