CREATE TABLE payments (
    -- The event_id of the OrderCreated that asked for it: every retry of a charge is the same charge.
    id         uuid        PRIMARY KEY,
    order_id   uuid        NOT NULL,
    status     text        NOT NULL,
    -- Integer minor units of the currency.
    amount     bigint      NOT NULL,
    currency   text        NOT NULL,
    -- The gateway's own id of the charge; a refund names it. NULL where the charge was declined.
    charge_id  text,
    -- Why the gateway declined.
    reason     text,
    -- Rises by one with every change; the aggregate_sequence of its event.
    version    bigint      NOT NULL,
    created_at timestamptz NOT NULL DEFAULT now(),
    updated_at timestamptz NOT NULL DEFAULT now(),

    -- The second line of defence behind the inbox: an order is charged once.
    CONSTRAINT payments_one_per_order UNIQUE (order_id),
    CONSTRAINT payments_status_is_known CHECK (status IN ('captured', 'declined', 'refunded')),
    CONSTRAINT payments_declined_has_a_reason CHECK ((status = 'declined') = (reason IS NOT NULL)),
    CONSTRAINT payments_charged_has_a_charge CHECK ((status = 'declined') = (charge_id IS NULL)),
    CONSTRAINT payments_amount_is_in_range CHECK (amount BETWEEN 1 AND 9007199254740991),
    CONSTRAINT payments_version_starts_at_one CHECK (version >= 1)
);
