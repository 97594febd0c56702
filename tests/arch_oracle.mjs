// The oracle for architectures: the prebuilt llama.cpp of node-llama-cpp evaluates a model file.
//     node tests/arch_oracle.mjs MODEL.gguf TOKENS POSITIONS     both as 1,2,3
// Writes a line per position to stdout: the logits after it, in the order of the ids.
import { getLlama, LlamaLogLevel } from "node-llama-cpp";

const [path, ...lists] = process.argv.slice(2);
const [tokens, positions] = lists.map((list) => Uint32Array.from(list.split(",").map(Number)));
const llama = await getLlama({ gpu: false, build: "never", logLevel: LlamaLogLevel.warn, logger: (level, text) => console.error(text) });
const model = await llama.loadModel({ modelPath: path, gpuLayers: 0 });
const context = await model.createContext({ contextSize: tokens.length + 8, batchSize: tokens.length, threads: 1, sequences: 1 });
// The package's low-level interface: the other one chooses what to evaluate by itself.
const raw = context._ctx;
const sampler = new llama._bindings.AddonSampler(model._model);
sampler.applyConfig({ temperature: 0 });
raw.initBatch(tokens.length);
const rows = raw.addToBatch(0, 0, tokens, positions);
await raw.decodeBatch();
for (const row of rows) {
  const pairs = (await raw.sampleToken(row, sampler, false, false, true))[3]; // id, logit, id, logit, …
  const logits = new Float32Array(pairs.length / 2);
  for (let i = 0; i < pairs.length; i += 2) logits[pairs[i]] = pairs[i + 1];
  console.log(logits.join(" "));
}
process.exit(0);
