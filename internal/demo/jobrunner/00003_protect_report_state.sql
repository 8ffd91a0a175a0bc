-- The one migration that adopting writegate asks of the job runner.
-- +goose Up
SELECT fence.protect('app.report_state');

-- +goose Down
SELECT fence.unprotect('app.report_state');
ALTER TABLE app.report_state DROP COLUMN last_fence;
