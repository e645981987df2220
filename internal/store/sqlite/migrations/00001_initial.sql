-- +goose Up
-- Times are Unix nanoseconds, 0 for none; hashes are lower-case hex; doc columns are JSON. Only SQL that
-- PostgreSQL understands as well is used.
CREATE TABLE sandboxes (
    id            VARCHAR(64) PRIMARY KEY,
    project_id    VARCHAR(128) NOT NULL,
    state         VARCHAR(32)  NOT NULL,
    template_name VARCHAR(256) NOT NULL,
    node          VARCHAR(256) NOT NULL,
    version       BIGINT       NOT NULL,
    created_at    BIGINT       NOT NULL,
    last_active   BIGINT       NOT NULL,
    deleted_at    BIGINT       NOT NULL,
    doc           TEXT         NOT NULL
);
CREATE INDEX sandboxes_by_age ON sandboxes (created_at, id);
CREATE INDEX sandboxes_by_state ON sandboxes (state, deleted_at);

CREATE TABLE sandbox_metadata (
    sandbox_id VARCHAR(64) NOT NULL REFERENCES sandboxes (id) ON DELETE CASCADE,
    name       TEXT        NOT NULL,
    value      TEXT        NOT NULL,
    PRIMARY KEY (sandbox_id, name)
);
CREATE INDEX sandbox_metadata_by_value ON sandbox_metadata (name, value);

CREATE TABLE operations (
    id         VARCHAR(64) PRIMARY KEY,
    sandbox_id VARCHAR(64) NOT NULL REFERENCES sandboxes (id) ON DELETE CASCADE,
    ended      BIGINT      NOT NULL,
    created_at BIGINT      NOT NULL,
    doc        TEXT        NOT NULL
);
CREATE INDEX operations_open ON operations (ended, created_at, id);
CREATE INDEX operations_by_sandbox ON operations (sandbox_id);

CREATE TABLE sessions (
    id         VARCHAR(64) PRIMARY KEY,
    sandbox_id VARCHAR(64) NOT NULL REFERENCES sandboxes (id) ON DELETE CASCADE,
    process_id VARCHAR(64) NOT NULL,
    token_hash VARCHAR(64) NOT NULL,
    key_id     VARCHAR(64) NOT NULL,
    created_at BIGINT      NOT NULL,
    expires_at BIGINT      NOT NULL
);
CREATE INDEX sessions_by_sandbox ON sessions (sandbox_id);
CREATE INDEX sessions_by_expiry ON sessions (expires_at);

CREATE TABLE api_keys (
    id         VARCHAR(64)  PRIMARY KEY,
    project_id VARCHAR(128) NOT NULL,
    hash       VARCHAR(64)  NOT NULL UNIQUE,
    created_at BIGINT       NOT NULL,
    doc        TEXT         NOT NULL
);
CREATE INDEX api_keys_by_age ON api_keys (project_id, created_at, id);

CREATE TABLE idempotency (
    scope      TEXT        NOT NULL,
    name       TEXT        NOT NULL,
    body_hash  VARCHAR(64) NOT NULL,
    resource   TEXT        NOT NULL,
    created_at BIGINT      NOT NULL,
    expires_at BIGINT      NOT NULL,
    PRIMARY KEY (scope, name)
);
CREATE INDEX idempotency_by_expiry ON idempotency (expires_at);

CREATE TABLE settings (
    name  VARCHAR(128) PRIMARY KEY,
    value TEXT NOT NULL
);
