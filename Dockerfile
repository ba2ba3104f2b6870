# One image holds all programs; whoever runs it says which, as docker-compose.yml does.

FROM rust:1.95-slim-bookworm AS build
WORKDIR /src
ENV SQLX_OFFLINE=true

# The dependencies, in a layer that lasts until a manifest or the lock file changes: our crates are empty here.
# What was built of them is removed again, since cargo goes by file times and could take it for the real thing.
COPY Cargo.toml Cargo.lock ./
COPY outbox-core/Cargo.toml outbox-core/
COPY order-service/Cargo.toml order-service/
COPY payment-service/Cargo.toml payment-service/
COPY e2e-tests/Cargo.toml e2e-tests/
RUN for crate in outbox-core order-service payment-service e2e-tests; do \
      mkdir $crate/src && touch $crate/src/lib.rs; \
    done \
 && cargo build --release --locked -p outbox-core -p order-service -p payment-service \
 && cargo clean --release -p outbox-core -p order-service -p payment-service

COPY . .
RUN cargo build --release --locked -p outbox-core -p order-service -p payment-service

# No shell and no package manager, and a user without rights.
FROM gcr.io/distroless/cc-debian12:nonroot
COPY --from=build /src/target/release/order-service \
                  /src/target/release/payment-service \
                  /src/target/release/outbox-relay \
                  /src/target/release/outboxctl \
                  /usr/local/bin/
ENV LOG_FORMAT=json
