// node engines.mjs FILE.gguf PROMPT NEW THREADS: tokens/s of llama.cpp after the first token, greedy.
// Node looks for node-llama-cpp beside this file: engines.py runs a copy in .venv/llama_cpp.
import {getLlama} from "node-llama-cpp";

const [modelPath, prompt, count, threads] = process.argv.slice(2);
const llama = await getLlama({build: "never", gpu: false, logLevel: "error"});
const model = await llama.loadModel({modelPath});
const context = await model.createContext({contextSize: 512, threads: Number(threads)});
const ids = Array.from({length: Number(prompt)}, (_, i) => i + 1);
let speed;
for (let run = 0; run < 2; run++) {  // the first warms up
  const sequence = context.getSequence();
  const stamps = [];
  for await (const id of sequence.evaluate(ids, {temperature: 0, yieldEogToken: true})) {
    stamps.push(performance.now());
    if (stamps.length === Number(count)) break;
  }
  speed = 1000 * (stamps.length - 1) / (stamps.at(-1) - stamps[0]);
  sequence.dispose();
}
console.log(speed);
process.exit(0);
