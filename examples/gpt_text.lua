-- A language model of bytes: GPT on a text of your own, or on the King James Bible (Debian's bible-kjv).
--   dtrain examples/gpt_text.lua                                a few minutes on two cores, then a sample
--   mpirun -n 2 dtrain examples/gpt_text.lua --preset small     10.8 million parameters
--   dtrain examples/gpt_text.lua --data my.txt --prompt "Once upon a time"
local dt = require "dtrain"
local nn, optim, data = dt.nn, dt.optim, dt.data

local args = dt.args {
  preset = { default = "demo", choices = { "demo", "small" }, help = "size of model and run" },
  data = { default = "", help = "a text file; without it the Bible's text is made" },
  prompt = { default = "Ge1:1 In the beginning ", help = "what the sample begins with" },
  lr = { default = 0.0, help = "0: the preset's" },
  dropout = 0.0,
  precision = { default = "f32", choices = { "f32", "bf16", "f16" } },
}

local preset = ({
  demo = { layers = 4, heads = 4, width = 192, context = 128, batch = 16, steps = 500, lr = 2e-3, every = 125 },
  small = { layers = 6, heads = 6, width = 384, context = 256, batch = 8, steps = 2000, lr = 1e-3, every = 250 },
})[args.preset]
local lr = args.lr > 0 and args.lr or preset.lr

-- The text's file, in a folder that only the user writes to; rank 0 makes it, the others wait.
local function text_file()
  if args.data ~= "" then return args.data end
  local home = os.getenv "XDG_CACHE_HOME" or os.getenv "HOME" and os.getenv "HOME" .. "/.cache"
  local folder = io.open("build/dtrain", "rb") and "build" or home and home .. "/dtrain"
  if not folder then error("gpt_text: neither HOME nor XDG_CACHE_HOME says where to keep the text; give one: --data file.txt", 0) end
  local path = folder .. "/bible-kjv.txt"
  if dt.rank() == 0 and not io.open(path, "rb") then
    local made = os.execute(([[mkdir -p '%s' && part=$(mktemp '%s.XXXXXX') &&
      { bible -f gen1:1-rev22:21 > "$part" 2> /dev/null && mv "$part" '%s' || { rm -f "$part"; false; } }]]):format(
      folder, path, path))
    if not made then
      error("gpt_text: the program 'bible' is missing; apt install bible-kjv, or give a text: --data file.txt", 0)
    end
  end
  dt.barrier()
  return path
end

local model = nn.GPT { vocab = 256, layers = preset.layers, heads = preset.heads, width = preset.width,
  context = preset.context,
  dropout = args.dropout }

-- After the demo: the loss curve, a sample, and what to try next.
local function epilogue(engine)
  if args.preset ~= "demo" or dt.rank() ~= 0 or engine.options.quiet then return end
  print()
  print(dt.plot(engine.history, { title = "training loss, nats a byte", x = ("step %d"):format(#engine.history) }))
  print("\nThe model writes:\n")
  print(dt.generate(model, { prompt = args.prompt, count = 400, temperature = 0.7, seed = engine.job.run_seed }))
  print("\nNext:")
  print("  dtrain plan examples/gpt_text.lua --ranks 4           memory of each of four ranks, to the byte")
  print("  dtrain examples/gpt_text.lua --data README.md         a text of your own")
  print("  mpirun -n 2 dtrain examples/fashion_cnn.lua           images: 91 % after two epochs")
end

return dt.job {
  model     = model,
  loss      = nn.CrossEntropy(),
  data      = data.text { file = text_file(), context = preset.context, split = { train = 0.9, valid = 0.1 } },
  batch     = preset.batch,
  optimizer = optim.AdamW { lr = lr, betas = { 0.9, 0.95 }, weight_decay = 0.1, no_decay = true },
  schedule  = optim.warmup_cosine { warmup = preset.steps // 20, min = lr / 10 },
  precision = args.precision,
  clip      = 1.0,
  steps     = preset.steps,
  eval      = { every = preset.every, batches = 20, metrics = { "perplexity" } },
  after     = epilogue,
}
