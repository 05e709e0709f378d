// node complete.mjs FILE.gguf PROMPT COUNT [THREADS]: greedy text from llama.cpp, as JSON.
// {"prompt": ids, "ids": ids, "stamps": seconds, one an id, "text": text,
//  "template": the file's chat template}
import {getLlama} from "node-llama-cpp";

const [modelPath, prompt, count, threads = 1] = process.argv.slice(2);
const llama = await getLlama({build: "never", gpu: false, logLevel: "error"});
const model = await llama.loadModel({modelPath});
const context = await model.createContext({contextSize: 512, threads: Number(threads)});
const promptIds = model.tokenize(prompt);
const ids = [];
const stamps = [];
for await (const id of context.getSequence().evaluate(promptIds, {temperature: 0})) {
  if (model.isEogToken(id)) break;
  ids.push(id);
  stamps.push(performance.now() / 1000);
  if (ids.length === Number(count)) break;
}
const template = model.fileInfo.metadata.tokenizer.chat_template ?? null;
console.log(JSON.stringify({prompt: promptIds, ids, stamps, text: model.detokenize(ids), template}));
process.exit(0);
