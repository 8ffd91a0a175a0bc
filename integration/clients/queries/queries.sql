-- name: FinishOrder :execrows
UPDATE app.orders SET v = @v, last_fence = @fence WHERE id = @id AND last_fence < @fence;

-- name: SetOrder :exec
UPDATE app.orders SET v = @v WHERE id = @id;
