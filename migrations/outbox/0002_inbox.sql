-- The inbox: what a consumer has done with the events it was sent. Written in the same transaction
-- as the effect, which is what makes a second delivery harmless.

CREATE TABLE processed_events (
    consumer     text        NOT NULL,
    event_id     uuid        NOT NULL,
    processed_at timestamptz NOT NULL DEFAULT now(),

    PRIMARY KEY (consumer, event_id)
);

-- Processed longest ago: where retention looks.
CREATE INDEX processed_events_oldest ON processed_events (processed_at);

-- The last event of each aggregate that took effect. Never cleaned: processed ids may be removed
-- by age, and a delivery that comes later still is recognised by its number.
CREATE TABLE inbox_sequences (
    consumer      text   NOT NULL,
    source        text   NOT NULL,
    aggregate_id  uuid   NOT NULL,
    last_sequence bigint NOT NULL,

    PRIMARY KEY (consumer, source, aggregate_id),
    CONSTRAINT inbox_sequences_are_not_negative CHECK (last_sequence >= 0)
)
WITH (fillfactor = 80);

-- Events that must wait, held here and not by the broker, so that its limit of unacknowledged
-- messages can never fill up with them.
CREATE TABLE parked_events (
    consumer           text        NOT NULL,
    event_id           uuid        NOT NULL,
    source             text        NOT NULL,
    aggregate_id       uuid        NOT NULL,
    aggregate_sequence bigint      NOT NULL,
    event_type         text        NOT NULL,
    subject            text        NOT NULL,
    headers            jsonb       NOT NULL,
    payload            bytea       NOT NULL,
    -- gap: an earlier event of the aggregate has not taken effect. retry: its handler failed.
    reason             text        NOT NULL,
    attempts           int         NOT NULL DEFAULT 0,
    -- When to look again. For a gap this is its deadline, brought forward by the transaction that
    -- applies the missing event; while an instance has the event in hand, it is when another may.
    next_attempt_at    timestamptz NOT NULL,
    parked_at          timestamptz NOT NULL DEFAULT now(),
    last_error         text,

    PRIMARY KEY (consumer, event_id),
    CONSTRAINT parked_events_reason_is_known CHECK (reason IN ('gap', 'retry')),
    CONSTRAINT parked_events_attempts_are_not_negative CHECK (attempts >= 0)
);

CREATE INDEX parked_events_due ON parked_events (consumer, next_attempt_at);
CREATE INDEX parked_events_of_aggregate ON parked_events (consumer, source, aggregate_id, aggregate_sequence);

-- What a consumer gave up on, as whole: an operator can retry it or discard it.
CREATE TABLE dead_letters (
    dead_letter_id     uuid        PRIMARY KEY,
    consumer           text        NOT NULL,
    -- The identity columns are NULL where the message did not say, or not legibly.
    event_id           uuid,
    source             text,
    aggregate_id       uuid,
    aggregate_sequence bigint,
    event_type         text,
    -- Where the broker has it: the identity of a message that has no legible event_id.
    stream             text,
    stream_sequence    bigint,
    subject            text        NOT NULL,
    headers            jsonb       NOT NULL,
    payload            bytea       NOT NULL,
    reason             text        NOT NULL,
    attempts           int         NOT NULL DEFAULT 0,
    dead_at            timestamptz NOT NULL DEFAULT now()
);

-- A redelivery of a dead letter changes nothing.
CREATE UNIQUE INDEX dead_letters_one_per_event ON dead_letters (consumer, event_id) WHERE event_id IS NOT NULL;
CREATE UNIQUE INDEX dead_letters_one_per_message
    ON dead_letters (consumer, stream, stream_sequence) WHERE event_id IS NULL;
CREATE INDEX dead_letters_of_aggregate ON dead_letters (consumer, source, aggregate_id, aggregate_sequence);
