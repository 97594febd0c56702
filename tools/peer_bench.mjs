// peer_bench: the speed of the prebuilt llama.cpp in the npm package @node-llama-cpp/linux-x64 on a model file, alone or in turns
// with `engine bench`, and then the ratio engine / peer with its spread. `make deps` installs the package.
//
//     node tools/peer_bench.mjs MODEL.gguf [--engine ./engine] [--threads 2] [--prefill 512] [--decode 48] [--depth 0] [--repeats 5]
//
// Prefill is one batch of --prefill tokens after --depth others, decode is --decode single-token batches after them. The
// package's low-level interface is called directly: no sampler, no tokenizer, no JavaScript between two tokens but the
// loop below. What that costs is at most the time per token on a model that takes none: run it on models/tiny-chat-q8_0.gguf.
// The peer picks its fastest CPU code for the processor by itself and uses no GPU; what it picked is printed.
import { spawnSync } from "node:child_process";
import { createRequire } from "node:module";
import { parseArgs } from "node:util";
import os from "node:os";
import path from "node:path";
import { pathToFileURL, fileURLToPath } from "node:url";

const { values: opt, positionals } = parseArgs({
    allowPositionals: true,
    options: {
        engine: { type: "string" },
        threads: { type: "string", default: String(os.availableParallelism()) },
        prefill: { type: "string", default: "512" },
        decode: { type: "string", default: "48" },
        depth: { type: "string", default: "0" },
        repeats: { type: "string", default: "5" },
        modules: { type: "string", default: path.join(path.dirname(fileURLToPath(import.meta.url)), "../tests/node_modules") },
    },
});
const [model] = positionals;
const [threads, nPrefill, nDecode, depth, repeats] = [opt.threads, opt.prefill, opt.decode, opt.depth, opt.repeats].map(Number);
if (!model || positionals.length > 1 || [threads, nPrefill, nDecode, repeats].some((v) => !(v > 0)) || !(depth >= 0)) {
    console.error("usage: node tools/peer_bench.mjs MODEL.gguf [--engine PATH] [--threads N] [--prefill N] [--decode N] [--depth N] [--repeats N]");
    process.exit(2);
}

const entry = createRequire(path.resolve(opt.modules, "x.js")).resolve("node-llama-cpp");
const { getLlama, LlamaLogLevel } = await import(pathToFileURL(entry));
const picked = new Set();
let amx = 0;
const llama = await getLlama({
    gpu: false,
    build: "never",
    maxThreads: 0,
    logLevel: LlamaLogLevel.debug,
    logger: (level, text) => {
        const backend = /loaded CPU backend from .*\/(\S+)/.exec(text);
        if (backend) picked.add(backend[1]);
        if (/amx repack tensor/.test(text)) amx++;
    },
});
const peerModel = await llama.loadModel({ modelPath: model, gpuLayers: 0 });
const context = await peerModel.createContext({
    contextSize: depth + Math.max(nPrefill, nDecode) + 8,
    batchSize: Math.max(nPrefill, 512),
    threads: { ideal: threads, min: threads },
    sequences: 1,
});
const raw = context._ctx;
if (raw.getThreads() !== threads) throw new Error(`the peer uses ${raw.getThreads()} threads, not ${threads}`);
const vocab = peerModel.fileInfo.metadata.tokenizer.ggml.tokens.length;
const ids = Uint32Array.from({ length: depth + Math.max(nPrefill, nDecode) }, (_, i) => (i * 7919 + 13) % vocab);

async function batch(position, n) {
    raw.initBatch(n);
    raw.addToBatch(0, position, ids.subarray(position, position + n), Uint32Array.of(n - 1));
    await raw.decodeBatch();
}
async function start() { // the timeline holds `depth` tokens
    raw.disposeSequence(0);
    for (let at = 0; at < depth; at += 512) await batch(at, Math.min(512, depth - at));
}
async function peer() {
    await start();
    let begin = performance.now();
    await batch(depth, nPrefill);
    const prefill = (1000 * nPrefill) / (performance.now() - begin);
    await start();
    begin = performance.now();
    for (let i = 0; i < nDecode; i++) await batch(depth + i, 1);
    return { prefill, decode: (1000 * nDecode) / (performance.now() - begin) };
}
function engine() {
    const args = ["bench", model, "-t", threads, "-p", nPrefill, "-n", nDecode, "--depth", depth, "--repeat", 1, "--json", "-q"].map(String);
    const r = spawnSync(opt.engine, args, { encoding: "utf8", maxBuffer: 1 << 24 });
    if (r.status !== 0) throw new Error(`${opt.engine} ${args.join(" ")}: exit ${r.status}\n${r.stderr}`);
    const rows = JSON.parse(r.stdout).rows;
    const rate = (test) => rows.find((row) => row.test === test).tok_s;
    return { prefill: rate("prefill"), decode: rate("decode") };
}

const load = () => os.loadavg()[0].toFixed(1);
const spread = (list) => {
    const v = [...list].sort((a, b) => a - b), mid = v.length >> 1;
    return { min: v[0], median: v.length % 2 ? v[mid] : (v[mid - 1] + v[mid]) / 2, max: v[v.length - 1] };
};
const line = (name, list, digits) => {
    const s = spread(list);
    console.log(`${name.padEnd(16)} median ${s.median.toFixed(digits)}  (min ${s.min.toFixed(digits)}, max ${s.max.toFixed(digits)})`);
};

console.log(`${path.basename(model)}, ${threads} threads, prefill ${nPrefill}, decode ${nDecode}, depth ${depth}, ${repeats} repeats, load ${load()}`);
console.log(`peer: ${[...picked].join(" ")}, ${amx} matrices repacked for AMX; no GPU`);
const results = { peer: [], engine: [] };
await peer(); // warms caches and threads
for (let r = 0; r < repeats; r++) {
    const turns = opt.engine ? (r % 2 ? ["engine", "peer"] : ["peer", "engine"]) : ["peer"];
    for (const who of turns) results[who].push(who === "peer" ? await peer() : engine());
}
for (const test of ["prefill", "decode"]) {
    line(`${test} peer`, results.peer.map((r) => r[test]), 2);
    if (!opt.engine) continue;
    line(`${test} engine`, results.engine.map((r) => r[test]), 2);
    line(`${test} ratio`, results.engine.map((r, i) => r[test] / results.peer[i][test]), 3);
}
console.log(`load ${load()} at the end`);
process.exit(0);
