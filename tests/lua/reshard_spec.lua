-- A checkpoint of any layout goes on in any other: each pair of layouts below saves in the one and resumes in the other, and must end
-- as one process that was never interrupted. Momentum, a schedule, dropout and shuffled data have to come along.
local dt = require "dtrain"
local support = require "support"

local dir = support.folder()
support.write(dir .. "/a.lua", [[
local dt = require "dtrain"
local nn, optim, data = dt.nn, dt.optim, dt.data
local args = dt.args { dir = "", save = 0 }
return dt.job {
  model = nn.GPT { vocab = 256, context = 8, width = 16, layers = 2, heads = 2, dropout = 0.1 }, loss = nn.CrossEntropy(),
  data = data.text { file = "text", context = 8 }, batch = { global = 8, micro = 2 }, optimizer = optim.AdamW { lr = 1e-2 },
  schedule = optim.cosine { total = 20 }, clip = 1.0, steps = 6, checkpoint = { dir = args.dir, every = 3, keep = 0 } }
]])
local text = {}
for i = 1, 400 do text[i] = string.char(i * i % 33) end
support.write(dir .. "/text", table.concat(text))

local layouts = {
  { "one process", "none", 1 }, { "data 3", "none", 3 }, { "zero=1", "zero=1", 2 }, { "zero=3", "zero=3", 3 },
  { "tensor=2", "tensor=2", 2 }, { "pipeline=2", "pipeline=2", 2 }, { "tensor=2 and zero=2", "tensor=2,zero=2", 4 },
}

local function run(layout, folder, words)
  local code, out = support.run(("a.lua --quiet --dir %s --parallel %s %s"):format(folder, layout[2], words),
    { ranks = layout[3] > 1 and layout[3], dir = dir, seconds = 60 })
  assert(code == 0, out)
end

local function distance(a, b)
  a, b = a:to "f64", b:to "f64"
  local d = a - b
  return math.sqrt((d * d):sum():item()) / math.max(math.sqrt((b * b):sum():item()), 1e-30)
end

describe("a checkpoint written by", function()
  local want
  for i, from in ipairs(layouts) do
    it(from[1] .. " goes on in every other layout", function()
      if not want then
        run(layouts[1], "want", "")
        want = { dt.load(dir .. "/want/step-00000006/model.safetensors"), dt.load(dir .. "/want/step-00000006/optim.safetensors") }
      end
      local saved = "from" .. i
      run(from, saved, "--steps 3")
      for k, to in ipairs(layouts) do
        if k ~= i then
          local folder = saved .. "to" .. k
          run(to, folder, "--resume " .. saved)
          for f, name in ipairs { "model", "optim" } do
            local got = dt.load(("%s/%s/step-00000006/%s.safetensors"):format(dir, folder, name))
            for tensor, w in dt.sorted(want[f]) do
              local far = distance(got[tensor], w)
              -- the gradient of a key's bias is zero but for rounding, so Adam's steps of it are noise
              assert.is_true(far <= 1e-3 or tensor:find "qkv%.bias" ~= nil,
                ("%s to %s: %s is off by %g"):format(from[1], to[1], tensor, far))
            end
          end
        end
      end
    end)
  end
end)
