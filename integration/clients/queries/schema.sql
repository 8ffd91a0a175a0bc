CREATE SCHEMA app;
CREATE TABLE app.orders (id int PRIMARY KEY, v text NOT NULL, last_fence bigint NOT NULL DEFAULT 0);
