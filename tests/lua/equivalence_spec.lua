-- Every example on 1 to 4 ranks, in 1 to 3 microbatches a step, with sizes that nothing divides: after 5 steps losses, parameters
-- and optimizer states equal those of one process with one microbatch, to 1e-5 relative.
--
-- 23 samples and batches of 7 make the fourth step one of 2 samples: with 4 ranks two of them have none.
local dt = require "dtrain"
local support = require "support"

local dir = support.folder()
-- a text for the language model; any would do
local verses = {}
for i = 1, 200 do verses[i] = ("%d In the beginning was the word, and the word was with us.\n"):format(i * 7919) end
support.write(dir .. "/text.txt", table.concat(verses))

local examples = {
  { "linear" }, { "own_loop" }, { "own_model" }, { "own_optimizer" }, { "fashion_mlp" }, { "fashion_cnn" },
  { "gpt_text", ("--data %s/text.txt"):format(dir) },
}

local function have_fashion() return support.read "/usr/share/datasets/fashion-mnist/train-labels-idx1-ubyte.gz" ~= nil end

local function train(name, ranks, micro, save, words)
  local line = ("tests/dist/steps.lua --script examples/%s.lua --global 7 --micro %d --samples 23 --save %s.safetensors "
    .. "--steps 5 --quiet %s"):format(name, micro, save, words or "")
  local code, text = support.run(line, { ranks = ranks > 1 and ranks, seconds = 120 })
  assert(code == 0, text)
  return dt.load(save .. ".safetensors")
end

-- The gradient of a key's bias is zero but for rounding (softmax doesn't see it), and Adam makes steps of full size from
-- rounding: that third of qkv.bias is left out.
local function compared(name, t)
  if name:find "qkv%.bias" then
    local n = t:size(0) // 3
    return dt.concat({ t:slice { dim = 0, start = 0, stop = n }, t:slice { dim = 0, start = 2 * n, stop = 3 * n } }, 0)
  end
  return t
end

local function differences(got, want)
  local out = {}
  for name, w in dt.sorted(want) do
    local g = got[name]
    if not g then
      out[#out + 1] = name .. " is missing"
    else
      local d = support.distance(compared(name, g), compared(name, w))
      if d > 1e-5 or d ~= d then out[#out + 1] = ("%s: %.3g"):format(name, d) end
    end
  end
  return table.concat(out, "\n")
end

for _, e in ipairs(examples) do
  local name, words = e[1], e[2]
  describe("examples/" .. name .. ".lua", function()
    local want
    setup(function()
      if not name:find "fashion" or have_fashion() then want = train(name, 1, 0, dir .. "/want_" .. name, words) end
    end)
    for ranks = 1, 4 do
      for accumulation = 1, 3 do
        if ranks * accumulation > 1 then
          it(("on %d ranks in %d microbatches"):format(ranks, accumulation), function()
            if not want then pending "Debian's dataset-fashion-mnist is not installed" end
            local part = -(-7 // ranks)
            local micro = -(-part // accumulation)
            local got = train(name, ranks, micro, dir .. "/got", words)
            assert.are.equal("", differences(got, want))
          end)
        end
      end
    end
  end)
end

describe("a batch of more samples than the set has", function()
  it("on 3 ranks equals one process", function()
    local line = "tests/dist/steps.lua --script examples/linear.lua --global 50 --samples 11 --steps 5 --quiet --save "
    local code, text = support.run(line .. dir .. "/a.safetensors")
    assert(code == 0, text)
    code, text = support.run(line .. dir .. "/b.safetensors", { ranks = 3 })
    assert(code == 0, text)
    assert.are.equal("", differences(dt.load(dir .. "/b.safetensors"), dt.load(dir .. "/a.safetensors")))
  end)
end)

describe("dropout", function()
  it("is the same on 1 and 3 ranks", function()
    local line = "tests/dist/steps.lua --script tests/dist/dropout.lua --global 6 --samples 20 --steps 5 --quiet --save "
    local function words(save) return line .. dir .. save end
    local code, text = support.run(words "/c.safetensors")
    assert(code == 0, text)
    code, text = support.run(words "/d.safetensors" .. " --micro 1", { ranks = 3 })
    assert(code == 0, text)
    assert.are.equal("", differences(dt.load(dir .. "/d.safetensors"), dt.load(dir .. "/c.safetensors")))
  end)
end)
