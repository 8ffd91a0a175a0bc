-- +goose Up
INSERT INTO app.report_state (report, status, body, updated_by) VALUES
    ('2026-09', 'done', 'revenue 118', 'worker-z'),
    ('2026-10', 'done', 'revenue 121', 'worker-z'),
    ('2026-11', 'pending', NULL, NULL);

-- +goose Down
DELETE FROM app.report_state;
