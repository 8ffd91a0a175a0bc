.PHONY: test demo lint ci image build proof proof-long

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

# docs/proof.md; PROOF='-seed 42' repeats a run
proof:
	@go run ./integration/proof $(PROOF)

proof-long:
	@go run ./integration/proof -long -parts campaign,failover,patroni,hosts,controls $(PROOF)
