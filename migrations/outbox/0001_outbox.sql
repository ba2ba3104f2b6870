-- The outbox: events that were committed together with the change they tell of, and what the
-- relay still has to do about each of them.
--
-- Two tables, because they live differently. An event is wide and never changes. Its delivery is
-- narrow and is updated two or three times (leased, published): keeping the payload out of those
-- updates measured half as fast again as one wide table.

CREATE TABLE outbox_events (
    event_id           uuid        PRIMARY KEY,
    aggregate_type     text        NOT NULL,
    aggregate_id       uuid        NOT NULL,
    -- The aggregate's version after the change: the order in which its events take effect.
    aggregate_sequence bigint      NOT NULL,
    event_type         text        NOT NULL,
    event_version      int         NOT NULL,
    payload            jsonb       NOT NULL,
    -- Correlation id and trace context, frozen when the event was appended.
    headers            jsonb       NOT NULL DEFAULT '{}',
    -- The wall clock and not the transaction's start: it is taken under the aggregate's lock, so
    -- that the events of one aggregate carry rising times.
    created_at         timestamptz NOT NULL DEFAULT clock_timestamp(),

    CONSTRAINT outbox_events_one_event_per_version UNIQUE (aggregate_type, aggregate_id, aggregate_sequence),
    CONSTRAINT outbox_events_sequence_starts_at_one CHECK (aggregate_sequence >= 1),
    CONSTRAINT outbox_events_version_starts_at_one CHECK (event_version >= 1),
    CONSTRAINT outbox_events_headers_are_an_object CHECK (jsonb_typeof(headers) = 'object')
);

-- A fact does not change. Whoever got it wrong appends another one.
CREATE FUNCTION outbox_events_are_immutable() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    RAISE EXCEPTION 'outbox event % must not be changed', OLD.event_id
        USING ERRCODE = 'restrict_violation', HINT = 'Append a new event instead.';
END
$$;

CREATE TRIGGER outbox_events_are_immutable BEFORE UPDATE ON outbox_events
    FOR EACH ROW EXECUTE FUNCTION outbox_events_are_immutable();

CREATE TABLE outbox_deliveries (
    event_id           uuid        PRIMARY KEY REFERENCES outbox_events,
    -- Copied from the event, so that a claim reads this table only.
    aggregate_type     text        NOT NULL,
    aggregate_id       uuid        NOT NULL,
    aggregate_sequence bigint      NOT NULL,
    created_at         timestamptz NOT NULL,

    published_at       timestamptz,
    -- Set when only an operator can help; holds back the later events of its aggregate.
    failed_at          timestamptz,
    -- Recorded failures of this event itself; an outage of the broker counts against nobody.
    attempts           int         NOT NULL DEFAULT 0,
    next_attempt_at    timestamptz NOT NULL DEFAULT now(),
    -- The lease. locked_by names the worker for people; lease_id is fresh for every claim and is
    -- the fence: a relay that lost its lease can change nothing.
    locked_by          text,
    lease_id           uuid,
    lock_until         timestamptz,
    last_error         text,

    CONSTRAINT outbox_deliveries_attempts_are_not_negative CHECK (attempts >= 0),
    CONSTRAINT outbox_deliveries_published_or_failed CHECK (published_at IS NULL OR failed_at IS NULL),
    CONSTRAINT outbox_deliveries_lease_is_whole CHECK (
        (locked_by IS NULL) = (lease_id IS NULL) AND (lease_id IS NULL) = (lock_until IS NULL)
    )
)
-- Room on the page for the leased version of every row, which is half as long again, and no index on
-- what a claim writes: so a claim is a heap-only update, which touches no index. With 70 two thirds of
-- them were not. (A mark never is: it takes the row out of the partial indexes below.)
WITH (fillfactor = 40, autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_cost_delay = 1);

-- Oldest first: where a claim looks for candidates. Published rows are not in it, so that it stays
-- as small as the backlog, however many events are retained.
CREATE INDEX outbox_deliveries_unpublished ON outbox_deliveries (created_at) WHERE published_at IS NULL;

-- Is an earlier event of this aggregate still unpublished? One look-up per candidate.
CREATE INDEX outbox_deliveries_unpublished_aggregates
    ON outbox_deliveries (aggregate_type, aggregate_id, aggregate_sequence) WHERE published_at IS NULL;

-- Published longest ago: where retention looks. Written once for each event, at its right end.
CREATE INDEX outbox_deliveries_published ON outbox_deliveries (published_at) WHERE published_at IS NOT NULL;

-- Whose outbox this is, for programs that are not the service: relay and operator tools.
CREATE TABLE outbox_source (
    only_row       boolean PRIMARY KEY DEFAULT true,
    stream         text    NOT NULL,
    subject_prefix text    NOT NULL,
    source         text    NOT NULL,

    CONSTRAINT outbox_source_has_one_row CHECK (only_row)
);
