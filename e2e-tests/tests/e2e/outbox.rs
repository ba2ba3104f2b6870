//! The outbox: what is committed with a change, and what is not.

use outbox_core::{AggregateVersion, Context, append};
use serde_json::json;
use uuid::Uuid;

use crate::fixture::{Outbox, ThingHappened, context, drain};

fn first(id: Uuid) -> AggregateVersion {
    AggregateVersion { id, sequence: 1 }
}

#[tokio::test]
async fn an_event_is_sent_if_its_transaction_commits_and_not_otherwise() {
    let outbox = Outbox::new().await;
    let (committed, rolled_back) = (Uuid::now_v7(), Uuid::now_v7());
    sqlx::query("CREATE TABLE things (id uuid PRIMARY KEY)").execute(&outbox.db).await.unwrap();
    for id in [committed, rolled_back] {
        let mut tx = outbox.db.begin().await.unwrap();
        sqlx::query("INSERT INTO things VALUES ($1)").bind(id).execute(&mut *tx).await.unwrap();
        append(&mut tx, first(id), &ThingHappened(json!({})), &context()).await.unwrap();
        if id == committed { tx.commit().await.unwrap() } else { tx.rollback().await.unwrap() }
    }

    drain(&outbox.relay(&[])).await;

    let things: Vec<Uuid> = sqlx::query_scalar("SELECT id FROM things").fetch_all(&outbox.db).await.unwrap();
    let published: Vec<Uuid> = outbox.published().await.iter().map(|event| event.aggregate.id).collect();
    assert_eq!((things, published), (vec![committed], vec![committed]));
}

#[tokio::test]
async fn an_open_transaction_sends_nothing() {
    let outbox = Outbox::new().await;
    let mut tx = outbox.db.begin().await.unwrap();
    append(&mut tx, first(Uuid::now_v7()), &ThingHappened(json!({})), &context()).await.unwrap();
    assert_eq!(drain(&outbox.relay(&[])).await.seen, 0);
    tx.commit().await.unwrap();
    assert_eq!(drain(&outbox.relay(&[])).await.published, 1);
}

#[tokio::test]
async fn an_event_cannot_be_changed_once_it_is_appended() {
    let outbox = Outbox::new().await;
    outbox.append(Uuid::now_v7(), 1).await;
    let update = sqlx::query("UPDATE outbox_events SET payload = '{}'").execute(&outbox.db).await;
    assert!(update.unwrap_err().to_string().contains("must not be changed"));
}

#[tokio::test]
async fn two_events_cannot_be_the_same_number_of_one_aggregate() {
    let outbox = Outbox::new().await;
    let id = Uuid::now_v7();
    outbox.append(id, 1).await;
    let mut tx = outbox.db.begin().await.unwrap();
    let again = append(&mut tx, first(id), &ThingHappened(json!({})), &context()).await;
    let error = format!("{:?}", again.unwrap_err());
    assert!(error.contains("outbox_events_one_event_per_version"), "{error}");
}

#[tokio::test]
async fn an_event_is_published_with_the_context_it_was_appended_in() {
    let outbox = Outbox::new().await;
    let traceparent = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";
    let context = Context { correlation_id: "käse 1".into(), traceparent: Some(traceparent.into()) };
    let id = Uuid::now_v7();
    let mut tx = outbox.db.begin().await.unwrap();
    let event_id = append(&mut tx, first(id), &ThingHappened(json!({"a": [1, "ü"]})), &context).await.unwrap();
    tx.commit().await.unwrap();

    drain(&outbox.relay(&[])).await;

    let [event] = &outbox.published().await[..] else { panic!("one event was appended") };
    assert_eq!((event.id, event.aggregate, &event.context), (event_id, first(id), &context));
    assert_eq!((&*event.source, &*event.event_type, event.version), ("/things", "ThingHappened", 1));
    assert_eq!(event.payload::<serde_json::Value>().unwrap(), json!({"a": [1, "ü"]}));
}
