-- The job runner's own schema, from before it knew of writegate.
-- +goose Up
CREATE SCHEMA app;
CREATE TABLE app.report_state (
    report     text PRIMARY KEY,
    status     text NOT NULL DEFAULT 'pending',
    body       text,
    updated_by text
);

-- +goose Down
DROP TABLE app.report_state;
DROP SCHEMA app;
