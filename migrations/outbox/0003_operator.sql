-- What operators did to this outbox and inbox through outboxctl. Never cleaned.

CREATE TABLE operator_actions (
    action_id     uuid        PRIMARY KEY,
    -- As the operator's own system names him, which can be made up, and as this database does.
    who           text        NOT NULL,
    database_user text        NOT NULL DEFAULT session_user,
    begun_at      timestamptz NOT NULL DEFAULT now(),
    -- NULL while it runs, and for ever where it died: details then say how far it came.
    ended_at      timestamptz,
    -- The command, such as 'requeue'.
    what          text        NOT NULL,
    how_many      bigint      NOT NULL DEFAULT 0,
    -- What was asked for, and what it touched. A dead letter that was discarded is here as whole.
    details       jsonb       NOT NULL,

    CONSTRAINT operator_actions_how_many_is_not_negative CHECK (how_many >= 0),
    CONSTRAINT operator_actions_details_are_an_object CHECK (jsonb_typeof(details) = 'object')
);

CREATE INDEX operator_actions_newest ON operator_actions (begun_at);
