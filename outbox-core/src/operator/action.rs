//! The record of what operators did: all SQL on `operator_actions`.

use serde_json::Value;
use sqlx::types::Json;
use sqlx::{PgConnection, PgPool};
use uuid::Uuid;

use super::Operator;

/// An action that takes its time, and is recorded from its beginning on.
#[derive(Debug)]
pub(super) struct Action<'a> {
    db: &'a PgPool,
    pub(super) id: Uuid,
}

impl Operator {
    /// Records something done, in the transaction that does it: nothing is done without its record.
    pub(super) async fn record(
        &self,
        tx: &mut PgConnection,
        what: &str,
        how_many: usize,
        details: Value,
    ) -> Result<(), sqlx::Error> {
        let recording = sqlx::query(RECORD).bind(Uuid::now_v7()).bind(&self.who).bind(what);
        recording.bind(how_many as i64).bind(Json(details)).execute(tx).await?;
        Ok(())
    }

    /// Records that something begins, before its first part is done.
    pub(super) async fn begin(&self, what: &str, details: Value) -> Result<Action<'_>, sqlx::Error> {
        let action = Action { db: &self.db, id: Uuid::now_v7() };
        let beginning = sqlx::query(BEGIN).bind(action.id).bind(&self.who).bind(what).bind(Json(details));
        beginning.execute(&self.db).await?;
        Ok(action)
    }
}

const RECORD: &str = "
INSERT INTO operator_actions (action_id, who, what, how_many, details, ended_at) VALUES ($1, $2, $3, $4, $5, now())";

const BEGIN: &str = "
INSERT INTO operator_actions (action_id, who, what, details) VALUES ($1, $2, $3, $4)";

impl Action<'_> {
    /// Says that so many more are done, and how far it came.
    pub(super) async fn advance(&self, how_many: usize, details: Value) -> Result<(), sqlx::Error> {
        let advancing = sqlx::query(ADVANCE).bind(self.id).bind(how_many as i64).bind(Json(details));
        advancing.execute(self.db).await?;
        Ok(())
    }

    /// Says that it came to its end.
    pub(super) async fn end(&self) -> Result<(), sqlx::Error> {
        sqlx::query("UPDATE operator_actions SET ended_at = now() WHERE action_id = $1")
            .bind(self.id)
            .execute(self.db)
            .await?;
        Ok(())
    }
}

const ADVANCE: &str = "
UPDATE operator_actions SET how_many = how_many + $2, details = details || $3 WHERE action_id = $1";
