-- Every script of examples/strategies does what its comment says: a few steps on the ranks that it names, plan, explain and check.
local support = require "support"

local cases = { -- script, ranks, words that make it short, what explain shows
  { "zero3", 2, "--steps 2", "reduce_scatter data" }, { "tensor_sequence", 2, "--steps 2", "reduce_scatter tensor" },
  { "pipeline_own_schedule", 4, "--steps 2", "stage 0  F1 F2 F3 F4 F5 F6 F7" },
  { "gradient_hook", 2, "--steps 3", "the script's hook" },
  { "ddp_from_scratch", 2, "--steps 2", "all_reduce replica" }, { "zero1_from_scratch", 2, "--steps 2", "reduce_scatter replica" },
  { "hsdp", 4, "--steps 2", "all_reduce replica" }, { "quantised_gather", 2, "--steps 2", "all_gather data u8" },
  { "ulysses", 2, "--steps 2", "all_to_all context" }, { "moe", 2, "--steps 2", "all_to_all experts" },
  { "clip_contrastive", 2, "--steps 2", "all_gather data" }, { "ring_attention", 2, "--steps 2", "shift ring" },
  { "tensor_2d", 4, "--steps 2", "reduce_scatter row" }, { "conv_channels", 2, "--steps 2", "all_reduce channels" },
  { "own_rule", 2, "--steps 2", "all_reduce rows" },
  { "gossip", 4, "--steps 2", "shift ring" }, { "ema", 2, "--steps 2", "all_reduce data" },
  { "local_sgd", 2, "--steps 9", "every 8 steps" }, { "mesh_3d", 8, "--steps 2", "send pipeline" },
  { "zb_v", 4, "--steps 2", "rank 3 (stages 3, 4)  .    .    .    F1a  F1b  F2a  F2b" },
  { "dualpipe", 4, "--steps 2", "F9b  F10b F11b F1a  B1a  W1a  F2a  F12b+B2a+W2a" },
  { "two_optimizers", 2, "--steps 10", "all_reduce data" },
}

local function run(words, options)
  local code, text = support.run(words, options)
  assert.are.equal(0, code, text)
  assert.is_nil(text:find "warning", text)
  return text
end

describe("examples/strategies/", function()
  it("has no script without a test", function()
    local names = { gpt_175b = true } -- it is for planning: plan_spec.lua
    for _, c in ipairs(cases) do names[c[1]] = true end
    for name in support.list(support.root .. "/examples/strategies"):gmatch "%./(%S+)%.lua" do assert.is_true(names[name], name) end
  end)
  for _, c in ipairs(cases) do
    local script = ("examples/strategies/%s.lua"):format(c[1])
    it(c[1] .. " trains on its ranks", function()
      local text = run(script .. " " .. c[3], { ranks = c[2], seconds = 120 })
      assert.is_truthy(text:find "loss" or text:find "judge %d", text)
    end)
    it(c[1] .. " is planned and explained", function()
      run(("plan %s --ranks %d"):format(script, c[2]))
      local text = run(("explain %s --ranks %d"):format(script, c[2]))
      assert.is_truthy(text:find(c[4], 1, true), text)
    end)
  end
  for _, name in ipairs { "mesh_3d", "tensor_sequence" } do
    it(name .. " equals one process", function()
      local ranks = name == "mesh_3d" and 8 or 2
      run(("check examples/strategies/%s.lua --ranks %d --steps 1"):format(name, ranks), { seconds = 200 })
    end)
  end
  it("local_sgd has an outer optimizer", function() run("examples/strategies/local_sgd.lua --diloco --steps 9", { ranks = 2 }) end)
  it("zero3's comparison with plain data parallelism needs more", function()
    local function states(words)
      local text = run("plan examples/strategies/zero3.lua --ranks 4 " .. words)
      return tonumber((text:match "optimizer states%s+([%d.]+)"))
    end
    assert.is_true(states "--parallel zero=0" > 3 * states "", "states")
  end)
end)
