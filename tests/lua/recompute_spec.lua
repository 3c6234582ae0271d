-- Recompute: the same bits as without it, whatever is dropped; the planned activations shrink as they must; a budget is met with
-- the fewest blocks, or the error says how much is missing.
local support = require "support"

local function run(words, ranks)
  local code, text = support.run("tests/dist/recompute.lua --digest " .. words, { ranks = ranks })
  assert(code == 0, text)
  return { digest = text:match "digest (%x+)", losses = text:match "losses ([^\n]*)",
    repeated = tonumber(text:match "repeated (%d+)"),
    activations = tonumber(text:match "activations (%d+)") }
end

local hows = { "full", "every=2", "every=3", "ops=gelu+gelu_tanh+relu+batch_norm+silu+tanh",
  "ops=layer_norm+conv2d+dropout+max_pool2d" }

describe("recompute gives the bits of a run without it", function()
  for _, kind in ipairs { "gpt", "cnn", "mlp", "own" } do
    -- in 16 bits the buffer's reader, which is kept, cuts a fused chain
    for _, precision in ipairs(kind == "own" and { "f32" } or { "f32", "bf16" }) do
      for _, micro in ipairs { 8, 3 } do
        it(("%s, %s, %d microbatches"):format(kind, precision, -(-8 // micro)), function()
          local words = ("--kind %s --precision %s --micro %d --how "):format(kind, precision, micro)
          local want = run(words .. "none")
          assert.are.equal(0, want.repeated)
          for _, how in ipairs(hows) do
            local got = run(words .. how)
            assert.are.equal(want.digest, got.digest, how)
            assert.are.equal(want.losses, got.losses, how)
            assert.is_true(got.activations < want.activations or got.repeated == 0, how)
          end
        end)
      end
    end
  end
  for _, divided in ipairs { "tensor=2", "tensor=2,sequence=true" } do
    it("on two ranks, " .. divided, function()
      local want, last
      for _, how in ipairs { "none", "full", "none,recompute.communication=true" } do
        local got = run(("--parallel %s,recompute=%s"):format(divided, how), 2)
        want, last = want or got, got.activations < (last or math.huge) and got.activations
        assert.are.equal(want.digest, got.digest, how)
        assert.is_truthy(last, how)
      end
    end)
  end
  it("on two ranks", function()
    local words = "--micro 2 --how "
    assert.are.equal(run(words .. "none", 2).digest, run(words .. "full", 2).digest)
  end)
end)

describe("the plan", function()
  local small = [[local dt = require "dtrain"
    local nn, optim, data = dt.nn, dt.optim, dt.data
    local args = dt.args { layers = 6 }
return dt.job { model = nn.GPT { vocab = 256, layers = args.layers, heads = 6, width = 384, context = 256 }, loss = nn.CrossEntropy(),
      data = data.synthetic { tokens = 256, context = 256, samples = 8 }, batch = 4, optimizer = optim.SGD { lr = 0.1 }, steps = 1,
      parallel = { recompute = %s } }]]
  local dir = support.folder()
  local function plan(how, words)
    support.write(dir .. "/gpt.lua", small:format(how))
    local code, text = support.run(("plan gpt.lua %s"):format(words or ""), { dir = dir })
    local n = text:match "activations%s+([%d,]+)"
    return n and math.tointeger(n:gsub(",", "") + 0), text, code
  end
  local one = 4 * 256 * 384 * 4 -- [B, T, W] in f32

  it("keeps one activation a block when all of it is recomputed", function()
    local less, more = plan('"full"', "--layers 5"), plan('"full"', "--layers 6")
    assert.are.equal(one, more - less)
    assert.is_true(plan '"none"' - plan('"none"', "--layers 5") > 14 * one)
  end)
  it("keeps fewer when blocks share a start", function()
    assert.are.equal(3 * one, plan '"full"' - plan "{ every = 2 }")
  end)
  it("shrinks by what the named operations made", function()
    assert.are.equal(6 * 4 * one, plan '"none"' - plan '{ ops = { "gelu_tanh" } }')
    assert.are.equal(3 * 4 * one, plan '"none"' - plan '{ ops = { "gelu_tanh" }, match = "blocks%.[0-2]" }')
  end)
  it("recomputes the blocks whose names match", function()
    local none, three, full = plan '"none"', plan '{ match = { "blocks%.[0-2]" } }', plan '"full"'
    assert.are.equal((none - full) // 2, none - three)
  end)
  it("meets a budget with the fewest blocks", function()
    local none, full = plan '"none"', plan '"full"'
    local block = (none - full) // 6
    for n = 0, 6 do
      assert.are.equal(none - n * block, (plan(("{ budget = %d }"):format(none - n * block))))
      if n < 6 then assert.are.equal(none - (n + 1) * block, (plan(("{ budget = %d }"):format(none - n * block - 1)))) end
    end
    assert.are.equal(plan '{ budget = 100000000 }', (plan '{ budget = "100MB" }'))
  end)
  it("says by how much a budget cannot be met", function()
    local _, text, code = plan '{ budget = "10 MB" }'
    assert.are.equal(1, code)
    assert.is_truthy(text:find("gpt.lua:4: parallel: recompute: budget 10,000,000 bytes cannot be met: with all 6 blocks "
      .. "recomputed the activations need [%d,]+ bytes, [%d,]+ too many"), text)
  end)
  it("counts what is repeated", function()
    local _, text = plan '"full"'
    assert.is_truthy(text:find "backward repeats 36 operations", text)
  end)
end)

describe("blocks", function()
  local nn = require("dtrain").nn
  local modules = require "dtrain.nn.module"
  local function names(model)
    local out = {}
    for module, name in pairs((modules.base.blocks(model))) do out[#out + 1] = name .. " " .. getmetatable(module).class.name end
    table.sort(out)
    return table.concat(out, ", ")
  end
  it("are the entries of lists, named by their path", function()
    assert.are.equal("0 Linear, 1 ReLU, 2 Sequential", names(nn.Sequential { nn.Linear(2, 2), nn.ReLU(),
      nn.Sequential { nn.Linear(2, 2), nn.Tanh() } }))
    assert.are.equal("blocks.0 Block, blocks.1 Block", names(nn.GPT { vocab = 8, layers = 2, heads = 1, width = 4, context = 4 }))
  end)
  it("of lists of lists are those of the outermost", function()
    local Net = nn.module "Net"
    function Net:init()
      self.layers = { { nn.Linear(2, 2), nn.Tanh() }, nn.ReLU() }
      self.parts = { tail = nn.Sequential { nn.GELU() } }
      self.inner = nn.Residual(nn.Sequential { nn.SiLU() })
    end
    assert.are.equal("inner.inner.0 SiLU, layers.0 Linear, layers.0 Tanh, layers.1 ReLU, parts.tail.0 GELU", names(Net()))
  end)
end)
