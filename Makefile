.PHONY: test demo lint ci image build

test:
	go test -race ./...

demo:
	go run ./cmd/fencecheck demo

build:
	go build -o bin/ ./cmd/...

lint:
	scripts/lint

image:
	scripts/postgres-image

ci:
	bash .ci/run
