CREATE TABLE orders (
    id          uuid        PRIMARY KEY,
    customer_id uuid        NOT NULL,
    status      text        NOT NULL,
    -- Integer minor units of the currency.
    amount      bigint      NOT NULL,
    currency    text        NOT NULL,
    -- Rises by one with every change, under the row's lock; the aggregate_sequence of its event.
    version     bigint      NOT NULL,
    created_at  timestamptz NOT NULL DEFAULT now(),
    updated_at  timestamptz NOT NULL DEFAULT now(),

    CONSTRAINT orders_status_is_known CHECK (status IN ('pending', 'paid', 'declined', 'cancelled', 'refunded')),
    -- 2^53 - 1: the largest integer that every JSON reader takes exactly.
    CONSTRAINT orders_amount_is_in_range CHECK (amount BETWEEN 1 AND 9007199254740991),
    CONSTRAINT orders_currency_is_a_code CHECK (currency ~ '^[A-Z]{3}$'),
    CONSTRAINT orders_version_starts_at_one CHECK (version >= 1)
)
WITH (fillfactor = 85);

-- The three ways the list is read, each newest first.
CREATE INDEX orders_newest ON orders (created_at DESC, id DESC);
CREATE INDEX orders_newest_by_customer ON orders (customer_id, created_at DESC, id DESC);
CREATE INDEX orders_newest_by_status ON orders (status, created_at DESC, id DESC);

-- What a client's Idempotency-Key stood for when it was first used.
CREATE TABLE idempotency_keys (
    key        text        PRIMARY KEY,
    -- The parsed request, so that a key is bound to values and not to bytes.
    request    jsonb       NOT NULL,
    -- Deferred: the key is taken before its order is written, so that one of many requests writes it.
    order_id   uuid        NOT NULL REFERENCES orders DEFERRABLE INITIALLY DEFERRED,
    created_at timestamptz NOT NULL DEFAULT now()
);

CREATE INDEX idempotency_keys_oldest ON idempotency_keys (created_at);
