// The oracle for architectures: the prebuilt llama.cpp of node-llama-cpp evaluates model files.
//     node tests/arch_oracle.mjs MODEL.gguf TOKENS [MODEL.gguf TOKENS …]     tokens as 1,2,3
// Writes a line per token to stdout: the logits after it, in the order of the ids.
import { getLlama, LlamaLogLevel } from "node-llama-cpp";

const llama = await getLlama({ gpu: false, build: "never", logLevel: LlamaLogLevel.warn, logger: (level, text) => console.error(text) });
const args = process.argv.slice(2);
for (let arg = 0; arg < args.length; arg += 2) {
  const tokens = Uint32Array.from(args[arg + 1].split(",").map(Number)), n = tokens.length;
  const model = await llama.loadModel({ modelPath: args[arg], gpuLayers: 0 });
  const context = await model.createContext({ contextSize: n + 8, batchSize: n, threads: 1, sequences: 1 });
  const sampler = new llama._bindings.AddonSampler(model._model);
  sampler.applyConfig({ temperature: 0 });
  // The package's low-level interface: the other one chooses what to evaluate by itself.
  const raw = context._ctx;
  raw.initBatch(n);
  const rows = raw.addToBatch(0, 0, tokens, Uint32Array.from(tokens.keys()));
  await raw.decodeBatch();
  for (const row of rows) {
    const pairs = (await raw.sampleToken(row, sampler, false, false, true))[3]; // id, logit, id, logit, …
    const logits = new Float32Array(pairs.length / 2);
    for (let i = 0; i < pairs.length; i += 2) logits[pairs[i]] = pairs[i + 1];
    console.log(logits.join(" "));
  }
  await context.dispose();
  await model.dispose();
}
process.exit(0);
