-- The database of the newest version, as the migrations of sessions/store/schema.py make it of an empty one. Do not edit:
-- PYTHONPATH=.:tests python -P -m support.newest_schema sessions/store/newest_schema.sql
BEGIN IMMEDIATE;
CREATE TABLE "_sqlite_migrations" (
   "id" INTEGER PRIMARY KEY,
   "migration_set" TEXT,
   "name" TEXT,
   "applied_at" TEXT
);
CREATE UNIQUE INDEX "idx__sqlite_migrations_migration_set_name"
    ON "_sqlite_migrations" ("migration_set", "name");
CREATE TABLE "sessions" (
   "session_id" INTEGER PRIMARY KEY,
   "client_id" TEXT NOT NULL,
   "version" INTEGER NOT NULL,
   "expiry_interval" INTEGER NOT NULL,
   "disconnected_at" REAL,
   "will" BLOB,
   "will_due" REAL
, username TEXT, rules TEXT, permissions TEXT);
CREATE UNIQUE INDEX "idx_sessions_client_id"
    ON "sessions" ("client_id");
CREATE TABLE subscriptions (session_id INTEGER NOT NULL, topic_filter TEXT NOT NULL, qos INTEGER NOT NULL, options INTEGER NOT NULL, subscription_id INTEGER NOT NULL, PRIMARY KEY (session_id, topic_filter)) WITHOUT ROWID;
CREATE TABLE "messages" (
   "id" INTEGER PRIMARY KEY,
   "topic" TEXT NOT NULL,
   "qos" INTEGER NOT NULL,
   "retain" INTEGER NOT NULL,
   "properties" BLOB NOT NULL,
   "publisher" TEXT NOT NULL,
   "timestamp" INTEGER NOT NULL,
   "expires_at" INTEGER NOT NULL,
   "payload" BLOB NOT NULL
);
CREATE TABLE queue (session_id INTEGER NOT NULL, seq INTEGER NOT NULL, message_id INTEGER NOT NULL, shared INTEGER NOT NULL, qos INTEGER NOT NULL, retain INTEGER NOT NULL, subscription_ids BLOB NOT NULL, packet_id INTEGER NOT NULL, state INTEGER NOT NULL, size INTEGER NOT NULL, expires_at INTEGER, PRIMARY KEY (session_id, seq)) WITHOUT ROWID;
CREATE INDEX queue_shared ON queue (message_id) WHERE shared = 1;
CREATE TABLE received (session_id INTEGER NOT NULL, packet_id INTEGER NOT NULL, PRIMARY KEY (session_id, packet_id)) WITHOUT ROWID;
CREATE TABLE "retained" (
   "topic" TEXT NOT NULL,
   "qos" INTEGER NOT NULL,
   "properties" BLOB NOT NULL,
   "publisher" TEXT NOT NULL,
   "timestamp" INTEGER NOT NULL,
   "expires_at" INTEGER NOT NULL,
   "payload" BLOB NOT NULL
);
CREATE UNIQUE INDEX "idx_retained_topic"
    ON "retained" ("topic");
CREATE TABLE stream_ends (stream TEXT NOT NULL, partition INTEGER NOT NULL, end_offset INTEGER NOT NULL, PRIMARY KEY (stream, partition)) WITHOUT ROWID;
CREATE INDEX queue_expiry ON queue (expires_at) WHERE expires_at > 0;
CREATE TABLE producers (stream TEXT NOT NULL, user_name TEXT NOT NULL, producer_id TEXT NOT NULL, last INTEGER NOT NULL, missing BLOB NOT NULL, used INTEGER NOT NULL, PRIMARY KEY (stream, user_name, producer_id)) WITHOUT ROWID;
CREATE TABLE commit_log (id INTEGER PRIMARY KEY, identity TEXT NOT NULL, position INTEGER NOT NULL, closed INTEGER NOT NULL);
CREATE TABLE stream_readers (reader_id INTEGER PRIMARY KEY, kind INTEGER NOT NULL, session_id INTEGER NOT NULL, name TEXT NOT NULL, stream TEXT NOT NULL, topic_filter TEXT NOT NULL, start TEXT NOT NULL, options INTEGER NOT NULL, created INTEGER NOT NULL);
CREATE TABLE stream_offsets (reader_id INTEGER NOT NULL, partition INTEGER NOT NULL, position INTEGER NOT NULL, reserved INTEGER NOT NULL, pending BLOB NOT NULL, PRIMARY KEY (reader_id, partition)) WITHOUT ROWID;
INSERT INTO _sqlite_migrations (migration_set, name, applied_at) VALUES
  ('sessions', 'create_tables', strftime('%Y-%m-%d %H:%M:%f000+00:00', 'now')),
  ('sessions', 'add_username', strftime('%Y-%m-%d %H:%M:%f000+00:00', 'now')),
  ('sessions', 'add_rules', strftime('%Y-%m-%d %H:%M:%f000+00:00', 'now')),
  ('sessions', 'add_expiry', strftime('%Y-%m-%d %H:%M:%f000+00:00', 'now')),
  ('sessions', 'add_producers', strftime('%Y-%m-%d %H:%M:%f000+00:00', 'now')),
  ('sessions', 'add_permissions', strftime('%Y-%m-%d %H:%M:%f000+00:00', 'now')),
  ('sessions', 'add_commit_log', strftime('%Y-%m-%d %H:%M:%f000+00:00', 'now')),
  ('sessions', 'add_stream_readers', strftime('%Y-%m-%d %H:%M:%f000+00:00', 'now'));
PRAGMA application_id = 1297175618;
PRAGMA user_version = 8;
COMMIT;
